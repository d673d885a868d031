"""Names, arguments, defaults and returns are flash_attn's; FlashAttention-3's spelling; padding; the import shim."""

import inspect
import sys

import attention_math as math_
import flashattn
import flashattn.bert_padding
import flashattn.compat
import flashattn.interface
import numpy as np
import pytest
import torch
from flashattn import interface3

_2 = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, " \
     "deterministic=False, return_attn_probs=False"
_VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_CHUNKS = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
_TAIL = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"

# flash_attn 2.8.4, flash_attn/flash_attn_interface.py
FLASH_ATTN_2 = {
    "flash_attn_func": f"q, k, v, {_2}",
    "flash_attn_kvpacked_func": f"q, kv, {_2}",
    "flash_attn_qkvpacked_func": f"qkv, {_2}",
    "flash_attn_varlen_func": f"q, k, v, {_VARLEN}, {_2}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_VARLEN}, {_2}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_2}",
    "flash_attn_with_kvcache":
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}
# The same version, hopper/flash_attn_interface.py; qkv_dtype's default there is torch.bfloat16.
FLASH_ATTN_3 = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALES}, {_CHUNKS}, {_TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {_DESCALES}, {_CHUNKS}, deterministic=False, "
                                 "num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": f"q, k, v, {_VARLEN}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, "
                              f"qv=None, {_DESCALES}, {_CHUNKS}, {_TAIL}",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache":
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, {_CHUNKS}, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False",
    "get_scheduler_metadata":
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=None, "
        "headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, "
        "max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
        "pack_gqa=None, sm_margin=0",
}
PADDING = {"unpad_input": "hidden_states, attention_mask, unused_mask=None",
           "pad_input": "hidden_states, indices, batch, seqlen",
           "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length"}


@pytest.mark.parametrize("module, known", [(flashattn.interface, FLASH_ATTN_2), (interface3, FLASH_ATTN_3),
                                           (flashattn.bert_padding, PADDING)], ids=["2", "3", "padding"])
def test_signatures_are_those_of_flash_attn(module, known):
    for name, expected in known.items():
        assert str(inspect.signature(getattr(module, name))) == f"({expected})", name


def make(*shape, seed=0):
    return torch.randn(*shape, generator=math_.seeded(seed))


Q, K, V = make(2, 12, 4, 16), make(2, 40, 2, 16, seed=1), make(2, 40, 2, 24, seed=2)


def test_flash_attention_3_returns_what_2_returns():
    out, lse = interface3.flash_attn_func(Q, K, V, causal=True, window_size=(9, 0), softcap=2.0, return_attn_probs=True)
    expected, expected_lse, nothing = flashattn.flash_attn_func(Q, K, V, causal=True, window_size=(9, 0), softcap=2.0,
                                                                return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and nothing is None
    for parts in (4, -1):
        assert torch.allclose(interface3.flash_attn_func(Q, K, V, num_splits=parts), flashattn.flash_attn_func(Q, K, V), atol=1e-5)
    with pytest.raises(ValueError, match="num_splits is -2"):
        interface3.flash_attn_func(Q, K, V, num_splits=-2)
    leaf = Q.clone().requires_grad_()
    dq, = torch.autograd.grad(interface3.flash_attn_func(leaf, K, V, num_splits=4).sum(), leaf)
    assert torch.equal(dq, torch.autograd.grad(flashattn.flash_attn_func(leaf, K, V).sum(), leaf)[0])


def test_packed_with_fewer_key_heads():
    packed = make(2, 9, 8, 16)
    out = interface3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4)
    expected = flashattn.flash_attn_func(packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:], causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(interface3.flash_attn_qkvpacked_func(packed[:, :, :6].unflatten(2, (3, 2))),
                       flashattn.flash_attn_qkvpacked_func(packed[:, :, :6].unflatten(2, (3, 2))))
    with pytest.raises(flashattn.InvalidError, match="num_heads_q"):
        interface3.flash_attn_qkvpacked_func(packed)


def test_seqused_shortens_each_sequence():
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 10, 24], [0, 30, 80]))
    used_q, used_k = (torch.tensor(t, dtype=torch.int32) for t in ([7, 14], [11, 50]))
    q, k, v = Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1)
    out, lse = interface3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 14, 50, seqused_q=used_q, seqused_k=used_k,
                                                 causal=True, return_attn_probs=True)
    for b in range(2):
        alone = flashattn.flash_attn_func(*(t[c[b] : c[b] + u[b]].unsqueeze(0) for t, c, u in
                                            ((q, cu_q, used_q), (k, cu_k, used_k), (v, cu_k, used_k))), causal=True)
        assert torch.equal(out[cu_q[b] : cu_q[b] + used_q[b]], alone[0])
    assert (out[7:10] == 0).all() and torch.isneginf(lse[:, 7:10]).all()


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_combine_joins_disjoint_keys(library):
    parts = [flashattn.flash_attn_func(Q, K[:, a:b], V[:, a:b], return_attn_probs=True)[:2] for a, b in
             ((0, 13), (13, 14), (14, 40))]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts]).contiguous()
    if library == "numpy":
        outs, lses = outs.numpy(), lses.numpy()
    out, lse = interface3.flash_attn_combine(outs, lses)
    expected, expected_lse, _ = flashattn.flash_attn_func(Q, K, V, return_attn_probs=True)
    assert np.allclose(out, expected, atol=1e-5) and np.allclose(lse, expected_lse.transpose(1, 2), atol=1e-5)
    given = np.empty_like(out) if library == "numpy" else torch.empty_like(out)
    assert interface3.flash_attn_combine(outs, lses, out=given)[0] is given
    assert np.array_equal(given, out)
    if library == "torch":
        assert interface3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_paged_cache_in_the_third_spelling():
    cache_k, cache_v = make(6, 16, 2, 16, seed=4), make(6, 16, 2, 24, seed=5)
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    held = torch.tensor([40, 21], dtype=torch.int32)
    out = interface3.flash_attn_with_kvcache(Q, cache_k, cache_v, cache_seqlens=held, page_table=table, causal=True)
    packed = interface3.flash_attn_with_kvcache(
        Q.flatten(0, 1), cache_k, cache_v, cache_seqlens=held, page_table=table, causal=True,
        cu_seqlens_q=torch.tensor([0, 12, 24], dtype=torch.int32), max_seqlen_q=12)
    assert torch.equal(packed.view_as(out), out)
    metadata = interface3.get_scheduler_metadata(2, 12, 48, 4, 2, 16, held)
    assert torch.equal(interface3.flash_attn_with_kvcache(Q, cache_k, cache_v, cache_seqlens=held, page_table=table,
                                                          causal=True, scheduler_metadata=metadata, pack_gqa=True), out)
    index = torch.tensor([1, 0, 1], dtype=torch.int32)
    assert torch.equal(interface3.flash_attn_with_kvcache(Q[[1, 0, 1]], cache_k, cache_v, cache_seqlens=held[[1, 0, 1]],
                                                          page_table=table, cache_batch_idx=index, causal=True), out[[1, 0, 1]])
    for b in range(2):
        k, v = (c[table[b].long()].flatten(0, 1)[None, : held[b]] for c in (cache_k, cache_v))
        assert torch.allclose(out[b : b + 1], flashattn.flash_attn_func(Q[b : b + 1], k, v, causal=True), atol=1e-6)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_rotary_seqlens_say_where_positions_begin(library):
    """Beginning 7 earlier is the same as tables whose rows come 7 later."""
    angles = torch.arange(64).view(-1, 1) / 100 ** (torch.arange(8) / 8)
    held = torch.tensor([20, 7], dtype=torch.int32)
    inputs = Q[:, :3], make(2, 3, 2, 16, seed=6), make(2, 3, 2, 16, seed=7), angles.cos(), angles.sin(), held
    if library == "numpy":
        inputs = tuple(t.numpy() for t in inputs)
    q, k, v, cos, sin, held = inputs
    results = []
    for begin in (held - 7, None):
        caches = [make(2, 30, 2, 16, seed=n) for n in (4, 5)]
        caches = [c.numpy() for c in caches] if library == "numpy" else caches
        if begin is None:  # the same by turning the tables
            cos, sin = cos[:-7], sin[:-7]
            cos, sin = ((torch.cat if library == "torch" else np.concatenate)([t[:7], t]) for t in (cos, sin))
        out = interface3.flash_attn_with_kvcache(q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=held,
                                                 rotary_seqlens=begin, causal=True)
        results.append([out, *caches])
    for a, b in zip(*results):
        assert np.array_equal(a, b)
    with pytest.raises(flashattn.InvalidError, match="leftpad_k"):
        interface3.flash_attn_with_kvcache(q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=held,
                                           rotary_seqlens=held + 1)


def test_pages_in_the_varlen_form():
    cache = make(6, 16, 2, 16, seed=4)
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 12, 24], [0, 40, 61]))
    out = flashattn.flash_attn_varlen_func(Q.flatten(0, 1), cache, cache, cu_q, cu_k, 12, 40, causal=True,
                                           block_table=table)
    expected = flashattn.flash_attn_with_kvcache(Q, cache, cache, cache_seqlens=cu_k.diff(), block_table=table, causal=True)
    assert torch.equal(out.view_as(expected), expected)
    with pytest.raises(flashattn.UnsupportedError, match="gradient"):
        flashattn.flash_attn_varlen_func(Q.flatten(0, 1).requires_grad_(), cache, cache, cu_q, cu_k, 12, 40,
                                         block_table=table)
    with torch.no_grad():  # then none is wanted
        flashattn.flash_attn_varlen_func(Q.flatten(0, 1).requires_grad_(), cache, cache, cu_q, cu_k, 12, 40, block_table=table)


@pytest.mark.parametrize("append", [False, True])
def test_lengths_beyond_the_block_table_are_refused(append):
    """As flash_attn's own suite asks: the sentence names block_table, and full is not too much."""
    pages, table = make(4, 16, 1, 8), torch.zeros(1, 1, dtype=torch.int32)
    q = make(1, 1, 1, 8)
    new = make(1, 1, 1, 8) if append else None
    run = lambda held, new=None: flashattn.flash_attn_with_kvcache(
        q, pages.clone(), pages.clone(), new, new, cache_seqlens=torch.tensor([held], dtype=torch.int32), block_table=table)
    with pytest.raises(RuntimeError, match="block_table"):
        run(16 if append else 17, new)
    assert torch.equal(run(16), flashattn.flash_attn_func(q, pages[:1], pages[:1]))


def test_what_cannot_be_done_is_refused():
    with pytest.raises(flashattn.UnsupportedError, match="descales have no gradient"):
        interface3.flash_attn_func(Q.clone().requires_grad_(), K, V, q_descale=torch.ones(2, 2))
    with pytest.raises(flashattn.InvalidError, match="descale"):
        interface3.flash_attn_func(Q, K, V, q_descale=torch.ones(2, 2))  # of float32 inputs
    cache = torch.zeros(2, 50, 2, 16)
    with pytest.raises(flashattn.InvalidError, match="cu_seqlens_k_new needs k and v"):
        interface3.flash_attn_with_kvcache(Q, cache, cache, cu_seqlens_k_new=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(flashattn.InvalidError, match="together"):
        flashattn.flash_attn_with_kvcache(Q, cache, cache, k=K)
    with pytest.raises(flashattn.InvalidError, match="must have seqlen <= the seqlen of the KV cache"):
        flashattn.flash_attn_with_kvcache(Q, cache, cache.clone(), k=cache[:, :1], v=cache[:, :1])
    with pytest.raises(flashattn.InvalidError):
        flashattn.flash_attn_func(Q, K, V, dropout_p=1.0)


def test_float8_inputs_with_descales():
    kinds = [t[..., :16].to(torch.get_default_device(), torch.float8_e4m3fn) for t in (Q, K, V)]
    scales = [torch.tensor([[2.0, 0.5], [1.0, 4.0]]) for _ in range(3)]
    out = interface3.flash_attn_func(*kinds, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    assert out.dtype == torch.bfloat16
    q, k, v = (t.float() for t in kinds)
    q = q * scales[0].repeat_interleave(2, 1)[:, None, :, None]
    k, v = k * scales[1][:, None, :, None], v * scales[2][:, None, :, None]
    expected = flashattn.flash_attn_func(q, k, v)
    assert torch.nn.functional.cosine_similarity(out.float().flatten(), expected.flatten(), 0) > 0.999


def test_padding_goes_and_comes_back():
    hidden = make(3, 7, 2, 5).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = flashattn.bert_padding.unpad_input(hidden, mask)
    assert rows.shape == (10, 2, 5) and longest == 7 and cu_seqlens.dtype == used.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 3, 10, 10] and used.tolist() == [3, 7, 0]
    back = flashattn.bert_padding.pad_input(rows, indices, 3, 7)
    assert torch.equal(back, hidden * mask[:, :, None, None])
    back.sum().backward()
    assert torch.equal(hidden.grad, mask[:, :, None, None].expand_as(hidden).float())
    unused = torch.zeros_like(mask)
    unused[2, :2] = 1
    rows, indices, cu_seqlens, longest, used = flashattn.bert_padding.unpad_input(hidden, mask, unused)
    assert cu_seqlens.tolist() == [0, 3, 10, 12] and used.tolist() == [3, 7, 0]


def test_several_sequences_in_a_row_of_the_batch():
    hidden = make(3, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = flashattn.bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and longest == 6
    assert torch.equal(rows, torch.cat([hidden[0, :5], hidden[1, :5], hidden[2]]))
    assert torch.equal(flashattn.bert_padding.index_put_first_axis(rows, indices, 18).view(3, 6, 4)[:, :5], hidden[:, :5])


def test_the_shim_stands_in_for_flash_attn():
    assert "flash_attn" not in sys.modules
    flashattn.compat.install()
    try:
        import flash_attn
        import flash_attn_interface
        from flash_attn import flash_attn_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        assert flash_attn_func is flashattn.flash_attn_func and flash_attn_varlen_func is flashattn.flash_attn_varlen_func
        assert flash_attn_interface.flash_attn_func is interface3.flash_attn_func
        assert flash_attn_with_kvcache is flashattn.flash_attn_with_kvcache
        assert (unpad_input, pad_input) == (flashattn.bert_padding.unpad_input, flashattn.bert_padding.pad_input)
        assert torch.equal(index_first_axis(Q[0], torch.tensor([2, 1])), Q[0, [2, 1]])
        assert flash_attn.__version__.startswith("2.8")
        with pytest.raises(ImportError):
            import flash_attn.layers.rotary
        flashattn.compat.install()  # twice is harmless
    finally:
        flashattn.compat.uninstall()
    assert "flash_attn" not in sys.modules


def test_the_shim_does_not_replace_the_real_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", sys)  # stands for the real one
    with pytest.raises(ImportError, match="imported already"):
        flashattn.compat.install()


@pytest.mark.parametrize("window", [3, None, (1, 2, 3), (1.5, 2), "ab", (2**31, 0)])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_window_that_is_no_pair_is_said(window, gradient):
    for arrays in ((Q.clone().requires_grad_(gradient), K, V), (Q.numpy(), K.numpy(), V.numpy())):
        with pytest.raises(flashattn.InvalidError, match="window"):
            flashattn.flash_attn_func(*arrays, window_size=window)
