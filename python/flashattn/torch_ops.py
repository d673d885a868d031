"""PyTorch: custom operators with fake kernels and autograd, so torch.compile, export, checkpointing and DDP see through.

flashattn::forward   -> out, softmax_lse, rng_state
flashattn::backward  -> dq, dk, dv, dbias, dsinks (empty where not wanted)

Dropout's seed is drawn inside the forward from PyTorch's default CPU generator and handed on as rng_state (int64
[seed, offset]), so torch.manual_seed repeats it, checkpointing restores it, and both passes drop the same pairs.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _native
from ._call import Call, short_torch

_DOUBLE_BACKWARD = "flashattn: the backward has no gradient of its own (double backward is not supported)"


def _draw_seed(dropout_p):
    state = torch.zeros(2, dtype=torch.int64)
    return state.random_(0, 2**62) if dropout_p > 0 else state


def _call(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets,
          max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap, dropout_p, deterministic,
          rng_state):
    seed, offset = rng_state.tolist() if dropout_p > 0 else (0, 0)
    return Call(q, k, v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, slices=slices,
                slice_offsets=slice_offsets, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale,
                causal=causal, window=(window_left, window_right), softcap=softcap, dropout_p=dropout_p, seed=seed,
                offset=offset, deterministic=deterministic)


@torch.library.custom_op("flashattn::forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], alibi_slopes: Optional[Tensor],
            sinks: Optional[Tensor], cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor],
            seqused_q: Optional[Tensor], seqused_k: Optional[Tensor], slices: Optional[Tensor],
            slice_offsets: Optional[Tensor], max_seqlen_q: int, max_seqlen_k: int, scale: float, causal: bool,
            window_left: int, window_right: int, softcap: float, dropout_p: float,
            deterministic: bool) -> Tuple[Tensor, Tensor, Tensor]:
    rng_state = _draw_seed(dropout_p)
    out, lse = _call(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices,
                     slice_offsets, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap,
                     dropout_p, deterministic, rng_state).forward()
    return out, lse, rng_state


@forward.register_fake
def _(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets,
      max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap, dropout_p, deterministic):
    rows = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return (q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=torch.float32),
            torch.empty(2, dtype=torch.int64))


@torch.library.custom_op("flashattn::backward", mutates_args=())
def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
             bias: Optional[Tensor], alibi_slopes: Optional[Tensor], sinks: Optional[Tensor],
             cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor], seqused_q: Optional[Tensor],
             seqused_k: Optional[Tensor], slices: Optional[Tensor], slice_offsets: Optional[Tensor],
             max_seqlen_q: int, max_seqlen_k: int, scale: float, causal: bool, window_left: int, window_right: int,
             softcap: float, dropout_p: float, deterministic: bool, want_dbias: bool,
             want_dsinks: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices,
                 slice_offsets, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap,
                 dropout_p, deterministic, rng_state)
    grads = _empty_grads(q, k, v, bias, sinks, want_dbias, want_dsinks)
    dq, dk, dv, dbias, dsinks = grads
    call.backward(dout, out, lse, dq, dk, dv, dbias if want_dbias else None, dsinks if want_dsinks else None)
    return grads


def _empty_grads(q, k, v, bias, sinks, want_dbias, want_dsinks):
    def contiguous(t):
        return t.new_empty(t.shape)

    return (contiguous(q), contiguous(k), contiguous(v), contiguous(bias) if want_dbias else q.new_empty(0),
            sinks.new_empty(sinks.shape, dtype=torch.float32) if want_dsinks else q.new_empty(0))


@backward.register_fake
def _(dout, q, k, v, out, lse, rng_state, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
      slices, slice_offsets, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap, dropout_p,
      deterministic, want_dbias, want_dsinks):
    return _empty_grads(q, k, v, bias, sinks, want_dbias, want_dsinks)


def _raise_double_backward(ctx, *grads):
    raise RuntimeError(_DOUBLE_BACKWARD)


backward.register_autograd(_raise_double_backward, setup_context=lambda ctx, inputs, output: None)


def _setup_context(ctx, inputs, output):
    q, k, v, bias, alibi_slopes, sinks, *lengths = inputs[:12]
    out, lse, rng_state = output
    ctx.options = inputs[12:]
    ctx.save_for_backward(q, k, v, out, lse, rng_state, bias, alibi_slopes, sinks, *lengths)
    ctx.mark_non_differentiable(lse, rng_state)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse, drng_state):
    q, k, v, out, lse, rng_state, bias, alibi_slopes, sinks, *lengths = ctx.saved_tensors
    if dout is None:
        return (None,) * (12 + len(ctx.options))
    want_dbias = bias is not None and ctx.needs_input_grad[3]
    want_dsinks = sinks is not None and ctx.needs_input_grad[5]
    dq, dk, dv, dbias, dsinks = torch.ops.flashattn.backward(dout, q, k, v, out, lse, rng_state, bias, alibi_slopes,
                                                             sinks, *lengths, *ctx.options, want_dbias, want_dsinks)
    return (dq, dk, dv, dbias if want_dbias else None, None, dsinks.to(sinks.dtype) if want_dsinks else None,
            *(None,) * (6 + len(ctx.options)))


forward.register_autograd(_backward, setup_context=_setup_context)


_short_dtypes = {torch.float32: _native.F32, torch.float16: _native.F16, torch.bfloat16: _native.BF16}


# Looked up once: each is asked on every call.
_is_compiling, _grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.maybe_current_level
_is_tracing = torch._C._get_tracing_state
_forward_ad = torch.autograd.forward_ad


def _plain(tensors):
    """No gradient, no compiler, no tensor subclass: the C call may be made directly, without the dispatcher's cost."""
    grad = _grad_enabled()
    for t in tensors:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter or grad and t.requires_grad:
            return False
    return not _modes() and _transforms() is None and _is_tracing() is None


def attention(q, k, v, *, bias=None, alibi_slopes=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
              seqused_k=None, slices=None, slice_offsets=None, max_seqlen_q=0, max_seqlen_k=0, scale=None, causal=False,
              window=(-1, -1), softcap=0.0, dropout_p=0.0, deterministic=False, want_lse=True):
    """Differentiable attention on torch tensors: (out, softmax_lse, rng_state). Without want_lse the second may be None."""
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise _native.InvalidError(f"{name} is {type(t).__name__} but q is a PyTorch tensor: give arrays of one kind")
    if _forward_ad._current_level >= 0 and any(_forward_ad.unpack_dual(t).tangent is not None for t in (q, k, v)):
        raise _native.UnsupportedError("forward-mode differentiation is not supported: only the reverse mode")
    plain = not _is_compiling() and _plain((q, k, v))
    if plain and bias is alibi_slopes is sinks is cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is slices \
            is None and not dropout_p and q.dim() == k.dim() == v.dim() == 4 \
            and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device:
        dtype = _short_dtypes.get(q.dtype)
        if dtype is not None:
            done = short_torch(q, k, v, dtype, scale, causal, window, softcap, want_lse)
            if done is not None:
                return done[0], done[1], None
    if scale is None:
        scale = q.shape[-1] ** -0.5
    options = (bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, slices, slice_offsets,
               max_seqlen_q or 0, max_seqlen_k or 0, float(scale), causal, window[0], window[1], float(softcap),
               float(dropout_p), deterministic)
    if plain and _plain([t for t in (bias, sinks) if t is not None]):
        rng_state = _draw_seed(dropout_p) if dropout_p > 0 else None
        out, lse = _call(q, k, v, *options, rng_state).forward(want_lse=want_lse)
        return out, lse, rng_state
    return torch.ops.flashattn.forward(q, k, v, *options)


__all__ = ["attention", "forward", "backward"]
