"""flash_attn 2.8's functions: the same names, arguments, defaults and returns (Dao-AILab/flash-attention,
flash_attn/flash_attn_interface.py). Tensors may be PyTorch's (differentiable), NumPy's or anything with DLPack.

Differences: any head_dim up to 576, any strides, float32 too, head_dim of v may differ, page sizes need not be multiples
of 256, CPU as well as CUDA. return_attn_probs gives (out, softmax_lse, S_dmask) with S_dmask None: the probabilities
are never stored. The names with an underscore are flash_attn's own too: the passes alone, without autograd, which clients with
a backward of their own (ring attention, context parallelism) call.
"""

import numpy as np

from . import _native
from ._arrays import is_torch, wants_gradient
from ._call import Call, short_numpy
from ._kvcache import kvcache


_attention = None  # torch_ops.attention, once PyTorch is there: an import in the function would cost as much as a small call


def _torch_attention():
    global _attention
    from .torch_ops import attention

    _attention = attention
    return attention


def _attend(q, k, v, dropout_p, return_attn_probs, **options):
    if is_torch(q):
        out, lse, _ = (_attention or _torch_attention())(q, k, v, dropout_p=dropout_p, want_lse=return_attn_probs, **options)
    else:
        if options["alibi_slopes"] is None and not dropout_p and "cu_seqlens_q" not in options and "slices" not in options:
            done = short_numpy(q, k, v, options["scale"], options["causal"], options["window"], options["softcap"],
                               return_attn_probs)
            if done is not None:
                return (*done, None) if return_attn_probs else done[0]
        seed = int(np.random.randint(0, 2**62)) if dropout_p else 0  # np.random.seed repeats it
        out, lse = Call(q, k, v, dropout_p=dropout_p, seed=seed, **options).forward(want_lse=return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


def _attend_packed(q, packed, dropout_p, return_attn_probs, **options):
    """q, k and v, or with a q of its own k and v, are packed[..., n, :, :]."""
    count, what = (3, "qkv") if q is None else (2, "kv")
    dims = 4 if "cu_seqlens_q" in options else 5
    if len(packed.shape) != dims or packed.shape[-3] != count:
        raise _native.InvalidError(f"{what} has shape {tuple(packed.shape)}: expected {dims} dimensions, {count} in the third "
                                   "last")
    if is_torch(packed) and (q is None or is_torch(q)):
        from .torch_ops import attention_packed

        out, lse, _ = attention_packed(q, packed, dropout_p=dropout_p, want_lse=return_attn_probs, **options)
        return (out, lse, None) if return_attn_probs else out
    parts = [packed[..., n, :, :] for n in range(count)]
    return _attend(*([] if q is None else [q]), *parts, dropout_p, return_attn_probs, **options)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """Attention of q [batch, seqlen_q, heads_q, d] on k [batch, seqlen_k, heads_k, d] and v [batch, seqlen_k, heads_k,
    dv]; heads_q is a multiple of heads_k. Masks are aligned bottom right. window_size (left, right), -1: no limit.
    alibi_slopes float32 [heads_q] or [batch, heads_q]. Returns out [batch, seqlen_q, heads_q, dv]; with
    return_attn_probs also softmax_lse float32 [batch, heads_q, seqlen_q] and None."""
    return _attend(q, k, v, dropout_p, return_attn_probs, scale=softmax_scale, causal=causal, window=window_size,
                   softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """As flash_attn_func with kv [batch, seqlen_k, 2, heads_k, d]: views of one tensor, not copied."""
    return _attend_packed(q, kv, dropout_p, return_attn_probs, scale=softmax_scale, causal=causal, window=window_size,
                          softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """As flash_attn_func with qkv [batch, seqlen, 3, heads, d]."""
    return _attend_packed(None, qkv, dropout_p, return_attn_probs, scale=softmax_scale, causal=causal, window=window_size,
                          softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):
    """Sequences of different lengths packed along the first dimension: q [total_q, heads_q, d], k and v [total_k,
    heads_k, d]; sequence b is rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1 (int32 [batch + 1]). With block_table int32
    [batch, pages] k and v are paged, [num_pages, page_size, heads_k, d], and cu_seqlens_k gives the lengths (no gradient).
    Returns out [total_q, heads_q, dv]; with return_attn_probs also softmax_lse float32 [heads_q, total_q] and None."""
    options = dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, scale=softmax_scale, causal=causal,
                   window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)
    if block_table is None:
        return _attend(q, k, v, dropout_p, return_attn_probs, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k,
                       **options)
    if is_torch(q) and wants_gradient(q, k, v):
        raise _native.UnsupportedError("a paged cache has no gradient: give k and v without block_table, or detach them")
    if dropout_p:
        raise _native.UnsupportedError("dropout with a block_table is not supported: a paged cache is for inference")
    out, lse = Call(q, k, v, seqused_k=cu_seqlens_k[1:] - cu_seqlens_k[:-1], block_table=block_table,
                    **options).forward(want_lse=return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """As flash_attn_varlen_func with kv [total_k, 2, heads_k, d]."""
    return _attend_packed(q, kv, dropout_p, return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                          max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=softmax_scale, causal=causal,
                          window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """As flash_attn_varlen_func with qkv [total, 3, heads, d]."""
    return _attend_packed(None, qkv, dropout_p, return_attn_probs, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
                          max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, scale=softmax_scale, causal=causal,
                          window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False):
    """Decoding: append k, v [batch, seqlen_new, heads_k, d] to the cache in place (rotated if rotary_cos is given), then
    attention of q [batch, seqlen_q, heads_q, d] on what the cache holds. cache_seqlens: an int or int32 [batch], keys held
    before the call; it is not changed. k_cache, v_cache [batch_cache, seqlen_cache, heads_k, d], or with block_table
    [num_pages, page_size, heads_k, d]. Without a mask all queries are rotated to position cache_seqlens, with one query i
    to cache_seqlens + i; cache_leftpad does not shift positions. No backward. Returns out, or (out, softmax_lse [batch, heads_q, seqlen_q])."""
    out, lse = kvcache(q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                       rotary_interleaved=rotary_interleaved, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
                       cache_leftpad=cache_leftpad, block_table=block_table, scale=softmax_scale, causal=causal,
                       window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
                       want_lse=return_softmax_lse)
    return (out, lse) if return_softmax_lse else out


# ---- the passes alone, on PyTorch tensors ----


def _forward_pass(q, k, v, dropout_p, block_table=None, leftpad_k=None, num_splits=0, **options):
    import torch

    if block_table is None and leftpad_k is None and num_splits in (0, 1):
        from .torch_ops import attention

        with torch.no_grad():
            out, lse, rng_state = attention(q, k, v, dropout_p=dropout_p, **options)
    else:
        if dropout_p:
            raise _native.UnsupportedError("dropout with block_table, leftpad_k or num_splits is not supported: these are for "
                                           "inference")
        if block_table is not None and options["seqused_k"] is None:
            options["seqused_k"] = options["cu_seqlens_k"][1:] - options["cu_seqlens_k"][:-1]
        if block_table is not None:
            options["cu_seqlens_k"] = None
        out, lse = Call(q, k, v, block_table=block_table, leftpad_k=leftpad_k, num_splits=num_splits, **options).forward()
        rng_state = None
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device="cpu")
    return out, lse, q.new_empty(0), rng_state


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                        alibi_slopes, return_softmax):
    """flash_attn_func's forward: (out, softmax_lse float32 [batch, heads_q, seqlen_q], S_dmask, rng_state). S_dmask is empty,
    with return_softmax too: the probabilities are never stored. rng_state int64 [2] is what the backward takes; it lies on the
    CPU."""
    return _forward_pass(q, k, v, dropout_p, scale=softmax_scale, causal=causal, window=(window_size_left, window_size_right),
                         softcap=softcap, alibi_slopes=alibi_slopes)


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                               causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                               return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
                               zero_tensors=False, num_splits=0):
    """flash_attn_varlen_func's forward: as _flash_attn_forward with softmax_lse [heads_q, total_q]. zero_tensors changes
    nothing: every element is written anyway."""
    return _forward_pass(q, k, v, dropout_p, block_table, leftpad_k, num_splits, cu_seqlens_q=cu_seqlens_q,
                         cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                         scale=softmax_scale, causal=causal, window=(window_size_left, window_size_right), softcap=softcap,
                         alibi_slopes=alibi_slopes)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
                         window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
    """flash_attn_func's backward of out, softmax_lse and rng_state, into dq, dk and dv: of any strides, q's dtype or
    float32; None: not wanted. out and softmax_lse may be those over more keys than k has, as in a ring: then this is k's share
    of dq, and dk and dv are whole. Returns softmax_d float32 [batch, heads_q, seqlen_q rounded up to 128]: the sum over the
    head_dim of dout * out, times 1 - dropout_p."""
    from .torch_ops import backward_pass

    return backward_pass(dout, q, k, v, out, softmax_lse, dq, dk, dv, rng_state, dropout_p=dropout_p, scale=softmax_scale,
                         causal=causal, window=(window_size_left, window_size_right), softcap=softcap,
                         alibi_slopes=alibi_slopes, deterministic=deterministic)


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                                alibi_slopes, deterministic, rng_state=None, zero_tensors=False):
    """flash_attn_varlen_func's backward, as _flash_attn_backward. Returns softmax_d [heads_q, total_q + 128 batch], in which
    sequence b begins at cu_seqlens_q[b] + 128 b."""
    from .torch_ops import backward_pass

    return backward_pass(dout, q, k, v, out, softmax_lse, dq, dk, dv, rng_state, cu_seqlens_q=cu_seqlens_q,
                         cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, dropout_p=dropout_p,
                         scale=softmax_scale, causal=causal, window=(window_size_left, window_size_right), softcap=softcap,
                         alibi_slopes=alibi_slopes, deterministic=deterministic)


# flash_attn has each a second time, as PyTorch's registered operator.
_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = _flash_attn_forward, _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
