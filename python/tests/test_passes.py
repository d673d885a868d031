"""The passes alone, under flash_attn's names with an underscore: what ring attention and context parallelism are built of."""

import inspect

import attention_math as math_
import flashattn
import flashattn.compat
import pytest
import torch
from flashattn import interface, interface3

_MASKED = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_GRADS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
_WINDOW = "window_size_left=-1, window_size_right=-1"
# flash_attn 2.8.4, flash_attn/flash_attn_interface.py
PASSES_2 = {
    "_flash_attn_forward": f"q, k, v, {_MASKED}, return_softmax",
    "_flash_attn_varlen_forward": f"q, k, v, {_LENGTHS}, dropout_p, softmax_scale, causal, {_WINDOW}, softcap=0.0, "
                                  "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
                                  "zero_tensors=False, num_splits=0",
    "_flash_attn_backward": f"{_GRADS}, {_MASKED}, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": f"{_GRADS}, {_LENGTHS}, {_MASKED}, deterministic, rng_state=None, zero_tensors=False",
}
# The same version, hopper/flash_attn_interface.py
PASSES_3 = {
    "_flash_attn_forward":
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, "
        "seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
        "leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, "
        f"softmax_scale=None, causal=False, {_WINDOW}, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
    "_flash_attn_backward":
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
        f"{_WINDOW}, softcap=0.0, deterministic=False, sm_margin=0",
}
ROWS_Q, ROWS_K = (0, 7, 7, 24), (0, 20, 33, 80)


def lengths_of_three():
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, on PyTorch's default device."""
    return torch.tensor(ROWS_Q, dtype=torch.int32), torch.tensor(ROWS_K, dtype=torch.int32), 17, 47


def make(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=math_.seeded(seed)).to(dtype)


@pytest.mark.parametrize("module, known", [(interface, PASSES_2), (interface3, PASSES_3)], ids=["2", "3"])
def test_signatures_are_those_of_flash_attn(module, known):
    for name, expected in known.items():
        assert str(inspect.signature(getattr(module, name))) == f"({expected})", name


def test_the_shim_shows_them():
    flashattn.compat.install()
    try:
        from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_varlen_backward
        from flash_attn_3.flash_attn_interface import _flash_attn_backward as _flash_attn_3_backward
        from flash_attn_interface import _flash_attn_backward

        assert _flash_attn_forward is interface._flash_attn_forward and _flash_attn_backward is interface3._flash_attn_backward
        assert _flash_attn_3_backward is _flash_attn_backward
        assert _wrapped_flash_attn_varlen_backward is interface._flash_attn_varlen_backward
        assert not hasattr(__import__("flash_attn"), "_attend")
    finally:
        flashattn.compat.uninstall()


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(9, 2), softcap=3.0, scale=0.2, alibi=True),
                                     dict(causal=True, dropout_p=0.25)], ids=str)
def test_both_passes_are_those_of_the_public_functions(varlen, dtype, options):
    dropout_p, scale, causal, window, softcap = (options.get(name, default) for name, default in (
        ("dropout_p", 0.0), ("scale", 16**-0.5), ("causal", False), ("window", (-1, -1)), ("softcap", 0.0)))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.03]) if options.get("alibi") else None
    shapes = ((24, 4), (80, 2), (80, 2)) if varlen else ((2, 12, 4), (2, 40, 2), (2, 40, 2))
    q, k, v = (make(*shape, 16, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes))
    lengths, public = (lengths_of_three(), flashattn.flash_attn_varlen_func) if varlen else ((), flashattn.flash_attn_func)
    torch.manual_seed(5)
    expected, expected_lse, _ = public(q, k, v, *lengths, dropout_p, scale, causal, window, softcap, slopes,
                                       return_attn_probs=True)
    dout = make(*expected.shape, seed=8, dtype=dtype)
    expected_grads = torch.autograd.grad(expected, (q, k, v), dout)

    name = "_varlen" if varlen else ""
    torch.manual_seed(5)
    out, lse, probs, rng_state = getattr(interface, f"_flash_attn{name}_forward")(
        q, k, v, *lengths, dropout_p, scale, causal, *window, softcap, slopes, dropout_p > 0)
    math_.assert_same(out, expected, "out")
    math_.assert_same(lse, expected_lse, "lse")
    assert not out.requires_grad
    assert probs.numel() == 0 and rng_state.dtype == torch.int64 and rng_state.shape == (2,)
    # Gradients go into halves of a wider buffer, as those who own one give them.
    grads = [torch.full((*t.shape[:-1], 32), 7.0, dtype=dtype) for t in (q, k, v)]
    backward = getattr(interface, f"_flash_attn{name}_backward")
    rest = *lengths, dropout_p, scale, causal, *window, softcap, slopes, False, rng_state
    softmax_d = backward(dout, q, k, v, out, lse, *(g[..., :16] for g in grads), *rest)
    for given, expected in zip(grads, expected_grads):
        math_.assert_same(given[..., :16], expected)
        assert (given[..., 16:] == 7).all()

    dk = torch.empty_like(k)
    again = backward(dout, q, k, v, out, lse, None, dk, None, *rest)
    math_.assert_same(dk, expected_grads[1])
    math_.assert_same(again, softmax_d)
    math_.assert_same(backward(dout, q, k, v, out, lse, None, None, None, *rest), softmax_d)

    sums = (dout.double() * out.double()).sum(-1) * (1 - dropout_p)
    assert softmax_d.dtype == torch.float32
    if varlen:
        assert softmax_d.shape == (4, 24 + 3 * 128)
        parts = [softmax_d[:, ROWS_Q[b] + 128 * b : ROWS_Q[b + 1] + 128 * b] for b in range(3)]
        assert torch.allclose(torch.cat(parts, 1).double(), sums.T, atol=1e-5)
    else:
        assert softmax_d.shape == (2, 4, 128) and torch.allclose(softmax_d[:, :, :12].double(), sums.transpose(1, 2), atol=1e-5)
    assert softmax_d.count_nonzero() <= sums.numel()


def test_a_backward_without_the_forwards_rng_state_is_refused():
    q = make(1, 4, 1, 8)
    out, lse, _, _ = interface._flash_attn_forward(q, q, q, 0.5, 0.3, False, -1, -1, 0.0, None, True)
    with pytest.raises(flashattn.InvalidError, match="rng_state"):
        interface._flash_attn_backward(out, q, q, q, out, lse, q.clone(), None, None, 0.5, 0.3, False, -1, -1, 0.0, None, False)


def test_a_cache_in_the_varlen_forward():
    cache_k, cache_v = make(6, 16, 2, 16, seed=4), make(6, 16, 2, 24, seed=5)
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    q, cu_q, cu_k = make(24, 4, 16), torch.tensor([0, 12, 24], dtype=torch.int32), torch.tensor([0, 40, 61], dtype=torch.int32)
    expected, expected_lse = flashattn.flash_attn_with_kvcache(q.view(2, 12, 4, 16), cache_k, cache_v, cache_seqlens=cu_k.diff(),
                                                               block_table=table, causal=True, return_softmax_lse=True)
    run = lambda **more: interface._flash_attn_varlen_forward(q, cache_k, cache_v, cu_q, cu_k, 12, 48, 0.0, None, True,
                                                              block_table=table, **more)[:2]
    for out, lse in (run(), run(seqused_k=cu_k.diff()), run(num_splits=1)):
        math_.assert_same(out.view_as(expected), expected, "out")
        math_.assert_same(lse, expected_lse.transpose(0, 1).flatten(1), "lse")
    pad = torch.tensor([5, 0], dtype=torch.int32)
    expected = flashattn.flash_attn_with_kvcache(q.view(2, 12, 4, 16), cache_k, cache_v, cache_seqlens=cu_k.diff(),
                                                 cache_leftpad=pad, block_table=table, causal=True)
    math_.assert_same(run(leftpad_k=pad)[0].view_as(expected), expected, "left padding")
    with pytest.raises(flashattn.UnsupportedError, match="dropout"):
        interface._flash_attn_varlen_forward(q, cache_k, cache_v, cu_q, cu_k, 12, 48, 0.5, None, True, block_table=table)


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
def test_the_third_spelling(varlen):
    q, k, v = (make(24, 4, 16), make(80, 2, 16, seed=1), make(80, 2, 24, seed=2)) if varlen else (
        make(2, 12, 4, 16), make(2, 40, 2, 16, seed=1), make(2, 40, 2, 24, seed=2))
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths_of_three())) if varlen else {}
    public = interface3.flash_attn_varlen_func if varlen else interface3.flash_attn_func
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = public(*leaves, **lengths, causal=True, window_size=(8, 0), return_attn_probs=True)
    dout = make(*expected.shape, seed=8)
    expected_grads = torch.autograd.grad(expected, leaves, dout)
    given = torch.empty_like(expected)
    out, lse, *parts = interface3._flash_attn_forward(q, k, v, out_=given, **lengths, causal=True, window_size_left=8)
    assert out is given
    math_.assert_same(out, expected, "out")
    math_.assert_same(lse, expected_lse, "lse")
    assert [p.numel() for p in parts] == [0, 0]
    grads = [torch.empty_like(t) for t in (q, k, v)]
    interface3._flash_attn_backward(dout, q, k, v, out, lse, **lengths, dq=grads[0], dk=grads[1], dv=grads[2], is_causal=True,
                                    window_size_left=8)
    for grad, expected in zip(grads, expected_grads):
        math_.assert_same(grad, expected)


def test_the_third_spelling_appends_to_a_cache():
    q, k, v = make(2, 3, 4, 16), make(2, 3, 2, 16, seed=1), make(2, 3, 2, 24, seed=2)
    held = torch.tensor([20, 7], dtype=torch.int32)
    caches = [[make(3, 30, 2, 16, seed=3), make(3, 30, 2, 24, seed=4)] for _ in range(2)]
    entries = torch.tensor([2, 0], dtype=torch.int32)
    expected, expected_lse = interface3.flash_attn_with_kvcache(q, *caches[0], k, v, cache_seqlens=held, cache_batch_idx=entries,
                                                                causal=True, return_softmax_lse=True)
    out, lse, _, _ = interface3._flash_attn_forward(q, *caches[1], k, v, seqused_k=held, kv_batch_idx=entries, causal=True)
    math_.assert_same(out, expected, "out")
    math_.assert_same(lse, expected_lse, "lse")
    assert all(torch.equal(a, b) for a, b in zip(*caches))
    with pytest.raises(flashattn.UnsupportedError, match="cu_seqlens_k"):
        interface3._flash_attn_forward(q, *caches[1], k, v, seqused_k=held, cu_seqlens_k=lengths_of_three()[1])


def test_a_client_that_torch_compile_sees_through():
    class Client(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse, _, _ = interface._flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            interface._flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, 0.25, True, -1, -1, 0.0, None, False)
            return grads

    def loss(q, k, v):
        return Client.apply(q, k, v).square().sum()

    leaves = [make(1, 9, 2, 16, seed=n).requires_grad_() for n in range(3)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), expected):
        assert torch.allclose(a, b, atol=1e-6)


# ---- ring attention: each rank holds a share of the rows; keys and values go round ----


class _Ring(torch.autograd.Function):
    """Causal attention of equal shares of one sequence, [rank][batch, rows, heads, d], all ranks in this process. Forward: what a
    rank's queries see of each share, merged by LSE. Backward: each share's gradients with the LSE over all of them."""

    @staticmethod
    def forward(ctx, ranks, interface_, *shares):
        q, k, v = shares[:ranks], shares[ranks : 2 * ranks], shares[2 * ranks :]
        results = []
        for rank in range(ranks):
            out = lse = None
            for step in range(rank + 1):  # later ranks' keys are in the future
                other = rank - step
                part, part_lse = ring_forward(interface_, q[rank], k[other], v[other], step == 0)
                if out is None:
                    out, lse = part.float(), part_lse
                    continue
                total = torch.logaddexp(lse, part_lse)
                weights = (torch.exp(x - total).transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
                out, lse = sum(w * o for w, o in zip(weights, (out, part.float()))), total
            results += [out.to(q[rank].dtype), lse]
        ctx.ranks, ctx.interface = ranks, interface_
        ctx.save_for_backward(*shares, *results)
        return tuple(results[::2])

    @staticmethod
    def backward(ctx, *douts):
        ranks, saved = ctx.ranks, ctx.saved_tensors
        q, k, v = saved[:ranks], saved[ranks : 2 * ranks], saved[2 * ranks : 3 * ranks]
        results = saved[3 * ranks :]
        sums = [torch.zeros_like(t, dtype=torch.float32) for t in saved[: 3 * ranks]]
        buffers = [torch.empty_like(t) for t in (q[0], k[0], v[0])]
        for rank in range(ranks):
            for other in range(rank + 1):
                ring_backward(ctx.interface, douts[rank], q[rank], k[other], v[other], *results[2 * rank : 2 * rank + 2], buffers,
                             rank == other)
                for n, grad in zip((rank, ranks + other, 2 * ranks + other), buffers):
                    sums[n] += grad
        return None, None, *(s.to(t.dtype) for s, t in zip(sums, saved))


def ring_forward(module, q, k, v, causal):
    """Called by name with the defaults of the signature, as clients that serve several versions do."""
    arguments = {name: None if p.default is p.empty else p.default
                 for name, p in inspect.signature(module._flash_attn_forward).parameters.items()}
    arguments.update(q=q, k=k, v=v, softmax_scale=q.shape[-1] ** -0.5, causal=causal, window_size_left=-1, window_size_right=-1,
                     softcap=0.0)
    if "dropout_p" in arguments:
        arguments.update(dropout_p=0.0, return_softmax=False)
    out, lse, _, _ = module._flash_attn_forward(**arguments)
    return out, lse


def ring_backward(module, dout, q, k, v, out, lse, grads, causal):
    dq, dk, dv = grads
    options = dict(softmax_scale=q.shape[-1] ** -0.5, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False)
    options.update(dict(dropout_p=0.0, alibi_slopes=None, causal=causal) if module is interface else dict(is_causal=causal))
    module._flash_attn_backward(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, **options)


@pytest.mark.parametrize("module", [interface, interface3], ids=["2", "3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 5])
def test_ring_attention_is_the_whole_call(module, dtype, ranks):
    leaves = [make(2, 20 * ranks, heads, 32, seed=n, dtype=dtype).requires_grad_() for n, heads in enumerate((4, 2, 2))]
    out = torch.cat(_Ring.apply(ranks, module, *(share for t in leaves for share in t.chunk(ranks, 1))), 1)
    whole = flashattn.flash_attn_func(*leaves, causal=True)
    dout = make(*out.shape, seed=9, dtype=dtype)
    ours, expected = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(whole, leaves, dout)
    for a, b in zip((out, *ours), (whole, *expected)):
        scale = b.abs().max().item()
        assert (a - b).abs().max() <= scale * (2e-6 if dtype == torch.float32 else 2.0**-6)
        assert torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0) > 1 - (
            1e-11 if dtype == torch.float32 else 1e-4)
