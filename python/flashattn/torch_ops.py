"""PyTorch: custom operators with fake kernels and autograd, so torch.compile, export, checkpointing and DDP see through.

flashattn::forward   -> out, softmax_lse
flashattn::backward  -> dq, dk, dv, dbias, dsinks (empty where not wanted)

Dropout's seed is drawn before the forward from PyTorch's default CPU generator, by an operator of PyTorch's own, and handed to
both passes as rng_state (int64 [seed, offset], on the CPU): torch.manual_seed repeats it, checkpointing restores it, a
compiler knows what is random, and both passes drop the same pairs. Without dropout rng_state is None.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _native
from ._call import Call, short_torch, short_torch_backward, sides

_native.share_with_torch(torch.version.cuda)

_DOUBLE_BACKWARD = "flashattn: the backward has no gradient of its own (double backward is not supported)"


def _draw_seed(dropout_p):
    # The device is said, since torch.set_default_device may name another.
    return torch.randint(2**62, (2,), dtype=torch.int64, device="cpu") if dropout_p > 0 else None


def _call(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets,
          rng_state, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap, dropout_p,
          deterministic):
    if dropout_p > 0 and rng_state is None:
        raise _native.InvalidError("dropout needs an rng_state: int64 [seed, offset] on the CPU")
    seed, offset = rng_state.tolist() if dropout_p > 0 else (0, 0)
    return Call(q, k, v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, slices=slices,
                slice_offsets=slice_offsets, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale,
                causal=causal, window=(window_left, window_right), softcap=softcap, dropout_p=dropout_p, seed=seed,
                offset=offset, deterministic=deterministic)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], alibi_slopes: Optional[Tensor],
                 sinks: Optional[Tensor], cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor],
                 seqused_q: Optional[Tensor], seqused_k: Optional[Tensor], slices: Optional[Tensor],
                 slice_offsets: Optional[Tensor], rng_state: Optional[Tensor], max_seqlen_q: int, max_seqlen_k: int,
                 scale: float, causal: bool, window_left: int, window_right: int, softcap: float, dropout_p: float,
                 deterministic: bool) -> Tuple[Tensor, Tensor]:
    return _call(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices,
                 slice_offsets, rng_state, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap,
                 dropout_p, deterministic).forward()


forward = torch.library.custom_op("flashattn::forward", _run_forward, mutates_args=())


@forward.register_fake
def _(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets,
      rng_state, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap, dropout_p, deterministic):
    rows = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), q.new_empty(rows, dtype=torch.float32)


def _run_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Optional[Tensor],
                  alibi_slopes: Optional[Tensor], sinks: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
                  cu_seqlens_k: Optional[Tensor], seqused_q: Optional[Tensor], seqused_k: Optional[Tensor],
                  slices: Optional[Tensor], slice_offsets: Optional[Tensor], rng_state: Optional[Tensor],
                  max_seqlen_q: int, max_seqlen_k: int, scale: float, causal: bool, window_left: int, window_right: int,
                  softcap: float, dropout_p: float, deterministic: bool, want_dbias: bool,
                  want_dsinks: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices,
                 slice_offsets, rng_state, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap,
                 dropout_p, deterministic)
    grads = _empty_grads(q, k, v, bias, sinks, want_dbias, want_dsinks)
    dq, dk, dv, dbias, dsinks = grads
    call.backward(dout, out, lse, dq, dk, dv, dbias if want_dbias else None, dsinks if want_dsinks else None)
    return grads


backward = torch.library.custom_op("flashattn::backward", _run_backward, mutates_args=())


def _empty_grads(q, k, v, bias, sinks, want_dbias, want_dsinks):
    def contiguous(t):
        return t.new_empty(t.shape)

    return (contiguous(q), contiguous(k), contiguous(v), contiguous(bias) if want_dbias else q.new_empty(0),
            sinks.new_empty(sinks.shape, dtype=torch.float32) if want_dsinks else q.new_empty(0))


@backward.register_fake
def _(dout, q, k, v, out, lse, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices,
      slice_offsets, rng_state, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap, dropout_p,
      deterministic, want_dbias, want_dsinks):
    return _empty_grads(q, k, v, bias, sinks, want_dbias, want_dsinks)


def _raise_double_backward(ctx, *grads):
    raise RuntimeError(_DOUBLE_BACKWARD)


backward.register_autograd(_raise_double_backward, setup_context=lambda ctx, inputs, output: None)


_TENSORS = 13  # of the forward's arguments: q, k, v up to rng_state


def _setup_context(ctx, inputs, output):
    out, lse = output
    ctx.options = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:3], out, lse, *inputs[3:_TENSORS])
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    if dout is None:
        return (None,) * (_TENSORS + len(ctx.options))
    q, k, v, out, lse, bias, alibi_slopes, sinks, *others = saved = ctx.saved_tensors
    want_dbias = bias is not None and ctx.needs_input_grad[3]
    want_dsinks = sinks is not None and ctx.needs_input_grad[5]
    run = _run_backward if _may_call(dout, *saved) else torch.ops.flashattn.backward
    dq, dk, dv, dbias, dsinks = run(dout, q, k, v, out, lse, bias, alibi_slopes, sinks, *others, *ctx.options, want_dbias,
                                    want_dsinks)
    return (dq, dk, dv, dbias if want_dbias else None, None, dsinks.to(sinks.dtype) if want_dsinks else None,
            *(None,) * (_TENSORS - 6 + len(ctx.options)))


forward.register_autograd(_backward, setup_context=_setup_context)


# ---- eager calls: without the dispatcher's cost, which for a call with gradients is above a hundred microseconds ----

_short_dtypes = {torch.float32: _native.F32, torch.float16: _native.F16, torch.bfloat16: _native.BF16}


# Looked up once: each is asked on every call.
_is_compiling, _grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.maybe_current_level
_is_tracing = torch._C._get_tracing_state
_forward_ad, _Parameter = torch.autograd.forward_ad, torch.nn.Parameter


def _eager(tensors):
    """No compiler, tracer, transform, tensor subclass or view that negates what it shows: the C call may be made directly.
    Tensors may be None."""
    for t in tensors:
        if t is not None and (type(t) is not Tensor and type(t) is not _Parameter or t.is_neg()):
            return False
    return not _modes() and _transforms() is None and _is_tracing() is None


def _may_call(*tensors):
    """A backward may call C directly. With gradients on (create_graph) the operator is needed: its own backward says that
    there is none."""
    return not _grad_enabled() and not _is_compiling() and _eager(tensors)


def _contiguous_lengths(cu_seqlens, q):
    return cu_seqlens.dtype == torch.int32 and cu_seqlens.dim() == 1 and cu_seqlens.is_contiguous() and \
        cu_seqlens.device == q.device


def _short_dtype(q, k, v, cu_seqlens_q, cu_seqlens_k):
    """The dtype's code if short_torch can say the call to C."""
    dims = 4
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if cu_seqlens_q is None or cu_seqlens_k is None or not _contiguous_lengths(cu_seqlens_q, q) or \
                not _contiguous_lengths(cu_seqlens_k, q) or not 0 < len(cu_seqlens_q) == len(cu_seqlens_k):
            return None
        dims = 3
    dtype = q.dtype
    if q.dim() == k.dim() == v.dim() == dims and dtype == k.dtype == v.dtype and q.device == k.device == v.device and \
            (q.is_cpu or q.is_cuda):
        return _short_dtypes.get(dtype)
    return None


def _sayable(*tensors):
    """Four strides of zero mean contiguous to C."""
    return all([any(t.stride()) for t in tensors])


def _save_short(ctx, tensors, lse, cu_seqlens, max_seqlens, short, want_lse):
    ctx.short, ctx.max_seqlens = short, max_seqlens
    ctx.save_for_backward(*tensors, lse, *cu_seqlens)
    if want_lse:
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)


def _short_gradients(ctx, dout, q, k, v, out, lse, cu_seqlens, grads=None):
    """(dq, dk, dv), in `grads` if given and if that can be."""
    if _may_call(dout, q, k, v, out, lse, *cu_seqlens):
        done = short_torch_backward(dout, q, k, v, out, lse, *ctx.short, cu_seqlens, ctx.max_seqlens, grads)
        if done is not None:
            return done
    _, scale, causal, window, softcap = ctx.short
    options = _options(q, None, None, None, *(cu_seqlens or (None, None)), None, None, None, None, None, *ctx.max_seqlens,
                       scale, causal, window, softcap, 0.0, False)
    return torch.ops.flashattn.backward(dout, q, k, v, out, lse, *options, False, False)[:3]


class _ShortFunction(torch.autograd.Function):
    """short_torch with its gradient. cu_seqlens: () or (of q, of k); short: dtype, scale, causal, window, softcap."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlens, short, want_lse):
        out, lse = short_torch(q, k, v, *short, True, cu_seqlens, max_seqlens)
        _save_short(ctx, (q, k, v, out), lse, cu_seqlens, max_seqlens, short, want_lse)
        return (out, lse) if want_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        if dout is None:
            return None, None, None, None, None, None, None
        q, k, v, out, lse, *cu_seqlens = ctx.saved_tensors
        return *_short_gradients(ctx, dout, q, k, v, out, lse, cu_seqlens), None, None, None, None


class _PackedFunction(torch.autograd.Function):
    """The same on [..., 3, heads, d], or with a q of its own on [..., 2, heads, d]: one gradient, written in place, where
    autograd would put three together."""

    @staticmethod
    def forward(ctx, q, packed, cu_seqlens, max_seqlens, short, want_lse):
        views = packed.unbind(-3) if q is None else (q, *packed.unbind(-3))
        out, lse = short_torch(*views, *short, True, cu_seqlens, max_seqlens)
        _save_short(ctx, (q, packed, out), lse, cu_seqlens, max_seqlens, short, want_lse)
        return (out, lse) if want_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        if dout is None:
            return None, None, None, None, None, None
        q, packed, out, lse, *cu_seqlens = ctx.saved_tensors
        dpacked, dq, lead = packed.new_empty(packed.shape), None, ()
        if q is not None:
            dq = torch.empty_like(q)
            lead = (dq,)
        grads = (*lead, *dpacked.unbind(-3))
        done = _short_gradients(ctx, dout, *(() if q is None else (q,)), *packed.unbind(-3), out, lse, cu_seqlens, grads)
        if done is not grads:  # by the operator
            dq, dpacked = (None, torch.stack(done, -3)) if q is None else (done[0], torch.stack(done[1:], -3))
        return dq, dpacked, None, None, None, None


class _EagerFunction(torch.autograd.Function):
    """The forward operator, called directly. Inputs and gradients are the operator's own."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _run_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def _options(q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets,
             rng_state, max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, dropout_p, deterministic):
    """The operators' arguments after the tensors that each has first."""
    return (bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets, rng_state,
            max_seqlen_q or 0, max_seqlen_k or 0, float(q.shape[-1] ** -0.5 if scale is None else scale), causal,
            *sides(window), float(softcap), float(dropout_p), deterministic)


def attention_packed(q, packed, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, scale=None,
                     causal=False, window=(-1, -1), softcap=0.0, dropout_p=0.0, want_lse=True, alibi_slopes=None,
                     deterministic=False):
    """attention of q, k, v = packed.unbind(-3) (q None), or of k, v = packed.unbind(-3)."""
    views = packed.unbind(-3) if q is None else (q, *packed.unbind(-3))
    if not _is_compiling() and _grad_enabled() and alibi_slopes is None and not dropout_p and not deterministic and \
            (packed.requires_grad or q is not None and q.requires_grad) and _forward_ad._current_level < 0 and \
            _eager((q, packed, cu_seqlens_q, cu_seqlens_k)) and (q is None or isinstance(q, Tensor)):
        dtype = _short_dtype(*views, cu_seqlens_q, cu_seqlens_k)
        if dtype is not None and _sayable(*views):
            done = _PackedFunction.apply(q, packed, () if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k),
                                         (max_seqlen_q or 0, max_seqlen_k or 0), (dtype, scale, causal, window, softcap),
                                         want_lse)
            return (*done, None) if want_lse else (done, None, None)
    return attention(*views, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                     max_seqlen_k=max_seqlen_k, scale=scale, causal=causal, window=window, softcap=softcap,
                     dropout_p=dropout_p, want_lse=want_lse, alibi_slopes=alibi_slopes, deterministic=deterministic)


def attention(q, k, v, *, bias=None, alibi_slopes=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
              seqused_k=None, slices=None, slice_offsets=None, max_seqlen_q=0, max_seqlen_k=0, scale=None, causal=False,
              window=(-1, -1), softcap=0.0, dropout_p=0.0, deterministic=False, want_lse=True):
    """Differentiable attention on torch tensors: (out, softmax_lse, rng_state). Without want_lse the second may be None."""
    if _forward_ad._current_level >= 0 and any(_forward_ad.unpack_dual(t).tangent is not None for t in (q, k, v)):
        raise _native.UnsupportedError("forward-mode differentiation is not supported: only the reverse mode")
    eager = not _is_compiling() and _eager((q, k, v)) and (
        bias is sinks is cu_seqlens_q is None or _eager((bias, sinks, cu_seqlens_q, cu_seqlens_k)))
    if not eager:
        for name, t in (("k", k), ("v", v)):
            if not isinstance(t, Tensor):
                raise _native.InvalidError(f"{name} is {type(t).__name__} but q is a PyTorch tensor: give arrays of one kind")
    grad = eager and _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if eager and bias is alibi_slopes is sinks is seqused_q is seqused_k is slices is None and not dropout_p \
            and not (grad and deterministic):
        dtype = _short_dtype(q, k, v, cu_seqlens_q, cu_seqlens_k)
        if dtype is not None:
            cu_seqlens = () if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
            max_seqlens = max_seqlen_q or 0, max_seqlen_k or 0
            if not grad:
                done = short_torch(q, k, v, dtype, scale, causal, window, softcap, want_lse, cu_seqlens, max_seqlens)
                if done is not None:
                    return done[0], done[1], None
            elif _sayable(q, k, v):
                short = dtype, scale, causal, window, softcap
                done = _ShortFunction.apply(q, k, v, cu_seqlens, max_seqlens, short, want_lse)
                return (*done, None) if want_lse else (done, None, None)
    rng_state = _draw_seed(dropout_p)
    options = _options(q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets,
                       rng_state, max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, dropout_p, deterministic)
    if not eager:
        return *torch.ops.flashattn.forward(q, k, v, *options), rng_state
    if grad or _grad_enabled() and any(t is not None and t.requires_grad for t in (bias, sinks)):
        return *_EagerFunction.apply(q, k, v, *options), rng_state
    return *_call(q, k, v, *options).forward(want_lse=want_lse), rng_state


def attention_heads_first(q, k, v, scale, causal):
    """Attention of [batch, heads, rows, d] without mask, dropout or gradient, on the short way; None where only attention serves."""
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) or _is_compiling() or not _eager((q, k, v)) \
            or _forward_ad._current_level >= 0:
        return None
    dtype = _short_dtype(q, k, v, None, None)
    done = None if dtype is None else short_torch(q, k, v, dtype, scale, causal, (-1, -1), 0.0, False, heads_first=True)
    return None if done is None else done[0]


# ---- the backward alone, for clients whose autograd is their own ----


def backward_pass(dout, q, k, v, out, lse, dq, dk, dv, rng_state=None, *, alibi_slopes=None, cu_seqlens_q=None,
                  cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=0, max_seqlen_k=0, scale=None, causal=False,
                  window=(-1, -1), softcap=0.0, dropout_p=0.0, deterministic=False):
    """Write those of the gradients dq, dk, dv that are not None; no autograd. Returns row_sums."""
    options = _options(q, None, alibi_slopes, None, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, None, rng_state,
                       max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, dropout_p, deterministic)
    with torch.no_grad():
        if not _is_compiling() and _eager((dout, q, k, v, out, lse, dq, dk, dv)):
            if not dq is dk is dv is None:
                _call(q, k, v, *options).backward(dout, out, lse, dq, dk, dv)
        else:
            grads = torch.ops.flashattn.backward(dout, q, k, v, out, lse, *options, False, False)
            for given, grad in zip((dq, dk, dv), grads):
                if given is not None:
                    given.copy_(grad)
        return row_sums(dout, out, cu_seqlens_q, 1 - dropout_p)


def row_sums(dout, out, cu_seqlens_q, kept):
    """kept * sum of dout * out over the head_dim, float32, where flash_attn has it: [batch, heads, seqlen_q rounded up to 128],
    or [heads, total_q + 128 batch] with sequence b from cu_seqlens_q[b] + 128 b on. What lies between is 0."""
    sums = (dout.float() * out).sum(-1).transpose(-1, -2)
    if kept != 1:
        sums = sums * kept
    if cu_seqlens_q is None:
        return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 128))
    rows = torch.arange(sums.shape[1], device=sums.device, dtype=cu_seqlens_q.dtype)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    spread = sums.new_zeros(sums.shape[0], sums.shape[1] + 128 * (len(cu_seqlens_q) - 1))
    return spread.index_copy_(1, rows + 128 * sequence, sums)


__all__ = ["attention", "attention_packed", "backward_pass", "forward", "backward"]
