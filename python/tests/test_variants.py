"""FlashAttention-3's attention_chunk, qv and new keys of several lengths, against plain attention and single calls."""

import attention_math as math_
import flashattn
import numpy as np
import pytest
import torch
from flashattn import interface3


def make(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=math_.seeded(seed)).to(dtype)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def chunk_mask(seqlen_q, seqlen_k, chunk, sees):
    """sees, and the key in the query's own chunk, pair by pair as the definition has it."""
    sees = sees.expand(1, 1, seqlen_q, seqlen_k).clone()
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            sees[0, 0, i, j] &= (i + seqlen_k - seqlen_q) // chunk == j // chunk
    return sees


# ---- attention_chunk ----


@pytest.mark.parametrize("pair", [(40, 40), (13, 40), (40, 13), (1, 33), (33, 1), (64, 128)], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 16, 500])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(5, 2))], ids=str)
def test_chunks_see_their_own_keys(pair, chunk, options):
    q, k, v = make(2, pair[0], 4, 16), make(2, pair[1], 2, 16, seed=1), make(2, pair[1], 2, 24, seed=2)
    sees = chunk_mask(*pair, chunk, math_.visible(*pair, options.get("causal", False), options.get("window_size", (-1, -1))))
    truth, truth_lse = math_.attention(q, k, v, sees)
    out, lse = interface3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
    math_.assert_close(out, truth, None, "out")
    assert torch.allclose(lse.double(), truth_lse, atol=1e-5)
    if out.is_cpu:
        numpy = interface3.flash_attn_func(*(t.numpy() for t in (q, k, v)), attention_chunk=chunk, **options)
        assert np.array_equal(numpy, out)
    split = interface3.flash_attn_func(q, k, v, attention_chunk=chunk, num_splits=3, **options)
    math_.assert_close(split, truth, None, "split")


def test_chunks_have_gradients():
    leaves = [make(2, rows, heads, 16, seed=n).requires_grad_() for n, (rows, heads) in enumerate(((30, 4), (45, 2), (45, 2)))]
    dout = make(2, 30, 4, 16, seed=3)
    truth, _ = math_.attention(*leaves, chunk_mask(30, 45, 8, math_.visible(30, 45, True)))
    expected = torch.autograd.grad(truth, leaves, dout.double())
    run = lambda *a: interface3.flash_attn_func(*a, attention_chunk=8, causal=True)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for function in (run, compiled):
        for a, b in zip(torch.autograd.grad(function(*leaves), leaves, dout), expected):
            math_.assert_close(a, b.double(), None, "gradient")


@pytest.mark.parametrize("used", [False, True])
def test_chunks_of_sequences_of_several_lengths(used):
    lengths_q, lengths_k = (10, 0, 14), (30, 12, 9)
    cu_q, cu_k = int32(0, 10, 10, 24), int32(0, 30, 42, 51)
    q, k, v = make(24, 4, 16), make(51, 2, 16, seed=1), make(51, 2, 16, seed=2)
    more = dict(seqused_q=int32(8, 0, 14), seqused_k=int32(17, 12, 5)) if used else {}
    if used:
        lengths_q, lengths_k = (8, 0, 14), (17, 12, 5)
    out = interface3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 14, 30, causal=True, attention_chunk=6, **more)
    for b in range(3):
        rows, keys = (slice(c[b], c[b] + n[b]) for c, n in ((cu_q, lengths_q), (cu_k, lengths_k)))
        alone = interface3.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], causal=True, attention_chunk=6)
        math_.assert_same(out[rows], alone[0], f"sequence {b}")


@pytest.mark.parametrize("paged", [False, True])
def test_chunks_of_a_cache(paged):
    """Keys and positions count from the end of the left padding, and new keys count."""
    held, pad = int32(20, 37), int32(0, 5)
    q, new_k, new_v = make(2, 3, 4, 16), make(2, 3, 2, 16, seed=1), make(2, 3, 2, 16, seed=2)
    caches = [make(2, 48, 2, 16, seed=3), make(2, 48, 2, 16, seed=4)]
    table = int32(4, 0, 2, 1, 5, 3).view(2, 3)
    given = [c.clone() for c in caches]
    if paged:
        given = [torch.empty(6, 16, 2, 16).index_copy_(0, table.flatten().long(), c.view(6, 16, 2, 16)) for c in caches]
    out = interface3.flash_attn_with_kvcache(q, *given, new_k, new_v, cache_seqlens=held, cache_leftpad=pad, causal=True,
                                             attention_chunk=8, page_table=table if paged else None)
    for b in range(2):
        k, v = (torch.cat([c[b : b + 1, pad[b] : held[b]], n[b : b + 1]], 1) for c, n in zip(caches, (new_k, new_v)))
        expected, _ = math_.attention(q[b : b + 1], k, v, chunk_mask(3, k.shape[1], 8, math_.visible(3, k.shape[1], True)))
        math_.assert_close(out[b : b + 1], expected, None, "out")


def test_a_negative_chunk_is_refused():
    q = make(1, 4, 1, 8)
    with pytest.raises(flashattn.InvalidError, match="attention_chunk is -3"):
        interface3.flash_attn_func(q, q, q, attention_chunk=-3)


# ---- qv ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 512), (16, 24)], ids=str)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_qv_adds_its_scores(dtype, dims, library):
    if library == "numpy" and dtype == torch.bfloat16:
        pytest.skip("NumPy has no bfloat16 of its own")
    d, dv = dims
    q, qv = make(2, 5, 4, d, dtype=dtype), make(2, 5, 4, dv, seed=1, dtype=dtype)
    k, v = make(2, 30, 1, d, seed=2, dtype=dtype), make(2, 30, 1, dv, seed=3, dtype=dtype)
    sees = math_.visible(5, 30, True)
    joined = torch.cat([q, qv], -1), torch.cat([k, v], -1), v
    truth, plain = math_.attention(*joined, sees)[0], math_.attention(*joined, sees, upcast=False)[0]
    given = [t.numpy() for t in (q, k, v, qv)] if library == "numpy" else [q, k, v, qv]
    out = interface3.flash_attn_func(*given[:3], qv=given[3], causal=True)
    math_.assert_close(torch.as_tensor(out), truth, plain, "out")
    assert (math_.attention(q, k, v, sees, scale=(d + dv) ** -0.5)[0] - truth).abs().max() > 0.1  # it matters


def test_qv_has_gradients():
    leaves = [make(1, 7, 2, 16), make(1, 9, 1, 16, seed=1), make(1, 9, 1, 20, seed=2), make(1, 7, 2, 20, seed=3)]
    q, k, v, qv = leaves = [t.requires_grad_() for t in leaves]
    dout = make(1, 7, 2, 20, seed=4)
    truth, _ = math_.attention(torch.cat([q, qv], -1), torch.cat([k, v], -1), v, math_.visible(7, 9))
    expected = torch.autograd.grad(truth, leaves, dout.double())
    for a, b in zip(torch.autograd.grad(interface3.flash_attn_func(q, k, v, qv=qv), leaves, dout), expected):
        math_.assert_close(a, b.double(), None, "gradient")


@pytest.mark.parametrize("order", ["v before k", "k before v"])
def test_a_latent_cache_is_not_copied(order, monkeypatch):
    """k and v side by side in one buffer, as multi-head latent attention has them."""
    d, dv, held = 64, 512, int32(40, 21)
    latent = make(6, 16, 1, d + dv)
    v, k = latent.split((dv, d), -1) if order == "v before k" else latent.split((d, dv), -1)[::-1]
    table, q, qv = int32(4, 0, 2, 1, 5, 3).view(2, 3), make(2, 1, 4, d, seed=1), make(2, 1, 4, dv, seed=2)
    joined = []
    real = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, dim: joined.append(parts[0].shape) or real(parts, dim))
    out = interface3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=held, page_table=table, causal=True)
    assert joined == [qv.shape if order == "v before k" else q.shape]  # the queries alone
    copied = interface3.flash_attn_with_kvcache(q, k.clone(), v.clone(), qv=qv, cache_seqlens=held, page_table=table, causal=True)
    assert len(joined) == 3 and torch.allclose(out, copied, atol=1e-5)
    for b in range(2):
        keys, values = (t[table[b].long()].flatten(0, 1)[None, : held[b]] for t in (k, v))
        truth, _ = math_.attention(real([q, qv], -1)[b : b + 1], real([keys, values], -1), values, math_.visible(1, int(held[b])))
        math_.assert_close(out[b : b + 1], truth, None, "out")


def test_what_qv_cannot_be_is_refused():
    q, v = make(1, 3, 2, 16), make(1, 3, 2, 24)
    with pytest.raises(flashattn.InvalidError, match="qv has shape"):
        interface3.flash_attn_func(q, q, v, qv=q)
    with pytest.raises(flashattn.UnsupportedError, match="qv with descales"):
        interface3.flash_attn_func(q, q, v, qv=v, k_descale=torch.ones(1, 2))
    with pytest.raises(flashattn.UnsupportedError, match="qv with descales"):
        interface3.flash_attn_with_kvcache(q, q, v, qv=v, v_descale=torch.ones(1, 2))


# ---- new keys of several lengths, queries of several lengths ----


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("kind", ["plain", "entries", "paged"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("packed", ["k", "q", "both"])
def test_new_keys_of_each_sequence(library, kind, rotary, packed):
    """What one call writes and gives is what a call for each sequence does."""
    count_q, count_k = ((2, 5, 0) if packed != "k" else (3, 3, 3)), ((4, 0, 3) if packed != "q" else (2, 2, 2))
    held, entries = int32(20, 7, 0), int32(2, 0, 3)
    cu_q, cu_k = (torch.tensor(np.cumsum((0, *n)), dtype=torch.int32) for n in (count_q, count_k))
    q, k, v = make(int(cu_q[-1]), 4, 16), make(int(cu_k[-1]), 2, 16, seed=1), make(int(cu_k[-1]), 2, 24, seed=2)
    angles = torch.arange(64).view(-1, 1) / 100 ** (torch.arange(8) / 8)
    options = dict(causal=True, window_size=(9, 0))
    tables = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin()) if rotary else {}
    entry, page = {"plain": (3, 30), "entries": (4, 30), "paged": (9, 16)}[kind]
    cache = [make(entry, page, 2, 16, seed=3), make(entry, page, 2, 24, seed=4)]
    table = int32(4, 0, 7, 1, 5, 3).view(3, 2)
    where = {"plain": {}, "entries": dict(cache_batch_idx=entries), "paged": dict(page_table=table)}[kind]
    appended = {"plain": {}, "entries": dict(cache_batch_idx=entries), "paged": dict(block_table=table)}[kind]

    written, expected = [c.clone() for c in cache], []
    for b in range(3):
        rows, keys, one = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1]), slice(b, b + 1)
        alone = [c[one] if kind == "plain" else c for c in written]
        turned = q[None, rows].clone()
        both = {**tables, **(dict(q=q[None, rows], q_out=turned) if rotary and count_q[b] else {})}
        if count_k[b] or "q" in both:
            flashattn.append_kv(*alone, *((k[None, keys], v[None, keys]) if count_k[b] else ()), cache_seqlens=held[one], **both,
                                **{n: t[one] for n, t in appended.items()})
        if count_q[b]:
            expected.append(interface3.flash_attn_with_kvcache(turned, *alone, cache_seqlens=held[one] + count_k[b], **options,
                                                               **{n: t[one] for n, t in where.items()})[0])
    more = {}
    if packed == "k":
        q = q.view(3, 3, 4, 16)
    else:
        more.update(cu_seqlens_q=cu_q, max_seqlen_q=5)
    if packed == "q":
        k, v = k.view(3, 2, 2, 16), v.view(3, 2, 2, 24)
    else:
        more.update(cu_seqlens_k_new=cu_k)
    together = [c.clone() for c in cache]
    given = dict(cache_seqlens=held, **tables, **where, **more)
    arrays = q, *together, k, v
    if library == "numpy":
        arrays = [t.numpy() for t in arrays]
        given = {n: t.numpy() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    out = interface3.flash_attn_with_kvcache(*arrays, **given, **options)
    math_.assert_same(torch.as_tensor(out).reshape(-1, 4, 24), torch.cat(expected), "out")
    for a, b in zip(together, written):
        math_.assert_same(a, b, "cache")


def test_new_keys_that_do_not_fit_are_refused_before_any_is_written():
    cache = make(2, 10, 1, 8)
    k = make(6, 1, 8, seed=1)
    caches = cache.clone(), cache.clone()
    run = lambda cu, held, **more: interface3.flash_attn_with_kvcache(make(2, 1, 1, 8), *caches, k, k, cache_seqlens=held,
                                                                      cu_seqlens_k_new=cu, **more)
    with pytest.raises(flashattn.InvalidError, match=r"cache_seqlens\[1\] is 7"):
        run(int32(0, 2, 6), int32(3, 7))
    with pytest.raises(flashattn.InvalidError, match="cu_seqlens_k_new goes from 0 to 5"):
        run(int32(0, 2, 5), int32(3, 3))
    with pytest.raises(flashattn.InvalidError, match="cu_seqlens_k_new goes from 0 to 6 in 1 sequences"):
        run(int32(0, 6), int32(3, 3))
    pages = dict(page_table=int32(1, 0, 0, 1).view(2, 2))
    for more, place in ((dict(cache_batch_idx=int32(1, 1)), "row 4 of entry 1"), (pages, "row 0 of page 0")):
        with pytest.raises(flashattn.InvalidError, match=f"two sequences go to {place}"):
            run(int32(0, 2, 6), int32(3, 4) if place[-7:] == "entry 1" else int32(9, 0), **more)
    assert all(torch.equal(c, cache) for c in caches)
    run(int32(0, 2, 6), int32(3, 9), **pages)  # rows 3 and 4 of page 1, then 9 of page 0 and 0 to 2 of page 1
    assert torch.equal(torch.cat([caches[0][1, 3:5], caches[0][0, 9:], caches[0][1, :3]]), k)
    run(int32(0, 2, 6), int32(3, 6))
    assert torch.equal(caches[0][1, 6:], k[2:])
