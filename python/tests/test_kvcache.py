"""flash_attn_with_kvcache: append, rotary, pages, left padding, batch index, against the formula."""

import attention_math as math_
import flashattn
import pytest
import torch
from flashattn import interface3


def rotate(x, cos, sin, positions, interleaved):
    """x [b, s, h, d]; cos, sin [positions, r / 2]; positions int [b, s]."""
    r = 2 * cos.shape[1]
    c, s = cos[positions].unsqueeze(2).double(), sin[positions].unsqueeze(2).double()
    part = x[..., :r].double()
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    ra, rb = a * c - b * s, a * s + b * c
    rotated = torch.stack([ra, rb], -1).flatten(-2) if interleaved else torch.cat([ra, rb], -1)
    return torch.cat([rotated.to(x.dtype), x[..., r:]], -1)


@pytest.mark.parametrize("mask", ["none", "causal", "local"])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("paged", [None, 256, 7])
@pytest.mark.parametrize("new", [0, 1, 5])
def test_append_then_attend(new, paged, rotary, mask):
    if rotary and not new:
        pytest.skip("flash_attn rotates only together with new keys")
    torch.manual_seed(0)
    batch, seqlen_q, capacity, heads_q, heads_k, d, dtype = 3, 4, 300, 4, 2, 64, torch.bfloat16
    q = torch.randn(batch, seqlen_q, heads_q, d).to(dtype)
    held = torch.tensor([13, 0 if new else 1, 250], dtype=torch.int32)
    dense_k, dense_v = (torch.randn(batch, capacity, heads_k, d).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, new, heads_k, d).to(dtype) if new else None for _ in range(2))
    cos = sin = None
    if rotary:
        angles = torch.rand(capacity, 16) * 6.28
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    window = (40, 3) if mask == "local" else (-1, -1)
    if paged:
        per_seq = -(-capacity // paged)
        table = torch.randperm(batch * per_seq + 3)[: batch * per_seq].view(batch, per_seq).int()
        cache_k, cache_v = (torch.full((batch * per_seq + 3, paged, heads_k, d), float("nan")).to(dtype) for _ in range(2))
        for cache, dense in ((cache_k, dense_k), (cache_v, dense_v)):
            padded = torch.nn.functional.pad(dense, (0, 0, 0, 0, 0, per_seq * paged - capacity))
            cache[table.long().flatten()] = padded.view(batch * per_seq, paged, heads_k, d)
    else:
        table, cache_k, cache_v = None, dense_k.clone(), dense_v.clone()
    before = held.clone()
    out, lse = flashattn.flash_attn_with_kvcache(
        q, cache_k, cache_v, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=held, block_table=table,
        causal=mask == "causal", window_size=window, rotary_interleaved=rotary == "interleaved", return_softmax_lse=True)
    assert torch.equal(held, before)

    full_k, full_v = dense_k.clone(), dense_v.clone()
    if rotary:
        steps = held.long().view(-1, 1) + torch.arange(new)
        k = rotate(k, cos, sin, steps, rotary == "interleaved")
        steps = held.long().view(-1, 1) + (torch.arange(seqlen_q) if mask != "none" else torch.zeros(seqlen_q).long())
        q = rotate(q, cos, sin, steps, rotary == "interleaved")
    for b in range(batch):
        if new:
            full_k[b, held[b] : held[b] + new], full_v[b, held[b] : held[b] + new] = k[b], v[b]
    used = torch.arange(capacity) < (held + new).view(-1, 1)
    sees = math_.visible(seqlen_q, capacity, mask == "causal", window, key_padding=used)
    truth, truth_lse = math_.attention(q, full_k, full_v, sees)
    plain, _ = math_.attention(q, full_k, full_v, sees, upcast=False)
    math_.assert_close(out, truth, plain, "out", factor=3)
    seen = truth_lse > -float("inf")
    assert torch.equal(lse > -float("inf"), seen)
    assert torch.allclose(lse[seen].double(), truth_lse[seen], atol=2e-2 if rotary else 1e-5)
    if new and not paged:
        rows = used & (torch.arange(capacity) >= held.view(-1, 1))
        assert torch.allclose(cache_k[rows].double(), full_k[rows].double(), atol=2e-2 if rotary else 0)
        assert torch.equal(cache_k[~rows], dense_k[~rows])


def test_batch_index_and_left_padding():
    torch.manual_seed(1)
    q = torch.randn(2, 1, 4, 32)
    cache_k, cache_v = torch.randn(5, 64, 2, 32), torch.randn(5, 64, 2, 32)
    index, pad = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([7, 20], dtype=torch.int32)
    held = torch.tensor([40, 64], dtype=torch.int32)
    out = flashattn.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=held, cache_batch_idx=index,
                                            cache_leftpad=pad, causal=True)
    for b in range(2):
        keys, values = (c[index[b], pad[b] : held[b]].unsqueeze(0) for c in (cache_k, cache_v))
        alone = flashattn.flash_attn_func(q[b : b + 1], keys, values)
        assert torch.allclose(out[b], alone[0], atol=1e-6 if out.is_cpu else 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_positions_count_from_the_caches_first_row(causal):
    """As flash_attn has it, also where the cache is padded on the left."""
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 3, 4, 32), *torch.randn(2, 2, 3, 2, 32)
    cache_k, cache_v = torch.randn(2, 2, 64, 2, 32)
    pad, held = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([40, 5], dtype=torch.int32)
    angles = torch.rand(64, 16) * 6.28
    full_k, full_v = cache_k.clone(), cache_v.clone()
    out = flashattn.flash_attn_with_kvcache(q, cache_k, cache_v, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
                                            cache_seqlens=held, cache_leftpad=pad, causal=causal)
    steps = held.long().view(-1, 1) + torch.arange(3)
    rotated = rotate(k, angles.cos(), angles.sin(), steps, True)
    q = rotate(q, angles.cos(), angles.sin(), steps if causal else steps[:, :1].expand(2, 3), True)
    for b in range(2):
        full_k[b, held[b] : held[b] + 3], full_v[b, held[b] : held[b] + 3] = rotated[b], v[b]
    assert torch.allclose(cache_k, full_k, atol=1e-5) and torch.equal(cache_v, full_v)
    sees = math_.visible(3, 64, causal, key_padding=torch.arange(64) < (held + 3).view(-1, 1), leftpad=pad)
    assert torch.allclose(out.double(), math_.attention(q, full_k, full_v, sees)[0], atol=2e-5)


def test_a_page_out_of_range_is_refused_and_nothing_is_lost():
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(4, 8, 2, 16)
    kept = cache.clone()
    table = torch.tensor([[0, 9]], dtype=torch.int32)
    with pytest.raises(flashattn.InvalidError, match="9"):
        flashattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=12, block_table=table)
    with pytest.raises(flashattn.InvalidError):
        flashattn.flash_attn_with_kvcache(q, cache, cache.clone(), torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16),
                                          cache_seqlens=12, block_table=table)
    assert torch.equal(cache, kept)


@pytest.mark.parametrize("nonsense, word", [
    (dict(softcap=-1.0), "softcap"), (dict(softmax_scale=float("nan")), "scale"), (dict(window_size=(-1, 2**31)), "window"),
    (dict(window_size=3), r"window is 3: expected two numbers"), (dict(cache_seqlens=2**40), "cache_seqlens is 1099511627776"),
    (dict(cache_seqlens=-1), "cache_seqlens is -1"), (dict(num_splits=-2), "num_splits"), (dict(alibi_slopes=torch.zeros(3)), "alibi_slopes"),
    (dict(cache_leftpad=torch.tensor([3, 99], dtype=torch.int32)), "leftpad_k"),
    (dict(cache_leftpad=torch.zeros(3, dtype=torch.int32)), "cache_leftpad"),
    (dict(cache_batch_idx=torch.tensor([0, 2], dtype=torch.int32)), "cache_batch_idx"),
    (dict(cache_seqlens=torch.tensor([7, 3], dtype=torch.int32)), "cache_seqlens.*new keys"),
    (dict(q=torch.zeros(2, 1, 3, 16)), "heads"), (dict(q=torch.zeros(2, 1, 4, 8)), "shape"),
    (dict(k=torch.zeros(2, 2, 16), v=torch.zeros(2, 2, 16)), "k has 3 dimensions")])
@pytest.mark.parametrize("rotary", [False, True])
def test_what_attention_refuses_is_not_appended(nonsense, word, rotary):
    torch.manual_seed(3)
    cache_k, cache_v = torch.randn(2, 2, 8, 2, 16)
    before = cache_k.clone(), cache_v.clone()
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)
    call = dict(q=q, k_cache=cache_k, v_cache=cache_v, k=k, v=v, cache_seqlens=torch.tensor([3, 4], dtype=torch.int32))
    if rotary:
        call.update(rotary_cos=torch.ones(8, 4), rotary_sin=torch.zeros(8, 4))
    with pytest.raises(flashattn.InvalidError, match=word):
        flashattn.flash_attn_with_kvcache(**{**call, **nonsense})
    assert torch.equal(cache_k, before[0]) and torch.equal(cache_v, before[1])
    flashattn.flash_attn_with_kvcache(**call)
    assert not torch.equal(cache_k, before[0])


def test_a_result_in_the_cache_is_refused_and_nothing_is_appended():
    cache_k, cache_v = torch.randn(2, 1, 8, 2, 16)
    before, new = cache_k.clone(), torch.randn(1, 1, 2, 16)
    with pytest.raises(flashattn.InvalidError, match="o and k share memory"):
        interface3._flash_attn_forward(torch.randn(1, 1, 2, 16), cache_k, cache_v, new, new, out_=cache_k[:, 5:6],
                                       seqused_k=torch.tensor([3], dtype=torch.int32))
    assert torch.equal(cache_k, before)
