"""FlashAttention-3's spelling (Dao-AILab/flash-attention, hopper/flash_attn_interface.py): the same names, arguments,
defaults and returns. What has no meaning here says so: qv and attention_chunk raise; pack_gqa, sm_margin and
scheduler_metadata are hints for one GPU's scheduler that never change a result, and are accepted."""

import numpy as np

from . import _native
from ._arrays import is_torch
from ._call import Call, merge
from .interface import kvcache


def _refuse(qv, attention_chunk):
    if qv is not None:
        raise _native.UnsupportedError("qv is not supported: give q and k with the concatenated head_dim instead")
    if attention_chunk:
        raise _native.UnsupportedError(f"attention_chunk {attention_chunk} is not supported: expected 0; slices express "
                                       "chunks")


def _attend(q, k, v, return_attn_probs, num_splits, descales, **options):
    described = any(d is not None for d in descales)
    differentiable = is_torch(q) and any(t.requires_grad for t in (q, k, v))
    if differentiable and described:
        raise _native.UnsupportedError("descales have no gradient: detach q, k and v")
    if differentiable or (is_torch(q) and not described and num_splits <= 1):
        from .torch_ops import attention

        out, lse, _ = attention(q, k, v, **options)
    else:
        out, lse = Call(q, k, v, num_splits=num_splits, q_descale=descales[0], k_descale=descales[1],
                        v_descale=descales[2], **options).forward()
    return (out, lse) if return_attn_probs else out


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False):
    """q [batch, seqlen_q, heads_q, d], k and v [batch, seqlen_k, heads_k, d or dv]. Descales float32 [batch, heads_k],
    for float8 inputs. Returns out, or (out, softmax_lse [batch, heads_q, seqlen_q])."""
    _refuse(qv, attention_chunk)
    return _attend(q, k, v, return_attn_probs, num_splits, (q_descale, k_descale, v_descale), scale=softmax_scale,
                   causal=causal, window=window_size, softcap=softcap, deterministic=deterministic)


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
                              num_heads_q=None, sm_margin=0, return_attn_probs=False):
    """qkv [batch, seqlen, 3, heads, d], or [batch, seqlen, heads_q + 2 heads_k, d] with num_heads_q."""
    _refuse(None, attention_chunk)
    if len(qkv.shape) == 5:
        q, k, v = qkv.unbind(2) if is_torch(qkv) else (qkv[:, :, n] for n in range(3))
    else:
        if num_heads_q is None:
            raise _native.InvalidError("a packed qkv of 4 dimensions needs num_heads_q")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = (qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k],
                   qkv[:, :, num_heads_q + heads_k :])
    return _attend(q, k, v, return_attn_probs, 1, (q_descale, k_descale, v_descale), scale=softmax_scale,
                   causal=causal, window=window_size, softcap=softcap, deterministic=deterministic)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """q [total_q, heads_q, d], k and v [total_k, heads_k, d or dv]; cu_seqlens int32 [batch + 1], seqused int32 [batch].
    Returns out, or (out, softmax_lse [heads_q, total_q])."""
    _refuse(qv, attention_chunk)
    return _attend(q, k, v, return_attn_probs, num_splits, (q_descale, k_descale, v_descale), scale=softmax_scale,
                   causal=causal, window=window_size, softcap=softcap, deterministic=deterministic,
                   cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
                   max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merge results over disjoint keys: out_partial [splits, batch, seqlen, heads, dv], lse_partial float32 [splits,
    batch, seqlen, heads]. Returns (out [batch, seqlen, heads, dv], softmax_lse [batch, seqlen, heads])."""
    if is_torch(out_partial):
        parts = [(o, lse.transpose(1, 2)) for o, lse in zip(out_partial.unbind(), lse_partial.unbind())]
        lse_out = lse_partial.new_empty(lse_partial.shape[1:])
        if out is None:
            out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype or out_partial.dtype)
        merge(parts, out, lse_out.transpose(1, 2))
        return out, lse_out
    parts = [(o, lse.transpose(0, 2, 1)) for o, lse in zip(out_partial, lse_partial)]
    lse_out = np.empty(lse_partial.shape[1:], dtype=np.float32)
    if out is None:
        out = np.empty(out_partial.shape[1:], dtype=out_dtype or out_partial.dtype)
    merge(parts, out, lse_out.transpose(0, 2, 1))
    return out, lse_out


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False):
    """As flash_attn's flash_attn_with_kvcache; page_table is its block_table. With cu_seqlens_q q is [total_q, heads_q, d].
    rotary_seqlens int32 [batch], at most cache_seqlens: the rotary position of the first new key, in place of cache_seqlens.
    Returns out, or (out, softmax_lse)."""
    _refuse(qv, attention_chunk)
    if cu_seqlens_k_new is not None:
        raise _native.UnsupportedError("cu_seqlens_k_new is not supported: append with equal lengths, or call append_kv yourself")
    if cu_seqlens_q is not None and k is not None:
        raise _native.UnsupportedError("cu_seqlens_q with new keys is not supported: call append_kv first")
    if page_table is not None and cache_batch_idx is not None:  # FlashAttention-3's alone: the rows of the table are looked up
        page_table = page_table[cache_batch_idx.long() if is_torch(cache_batch_idx) else cache_batch_idx]
        cache_batch_idx = None
    return kvcache(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
                   page_table, rotary_interleaved, return_softmax_lse, rotary_seqlens, scale=softmax_scale, causal=causal,
                   window=window_size, softcap=softcap, num_splits=num_splits, cu_seqlens_q=cu_seqlens_q,
                   max_seqlen_q=max_seqlen_q or 0, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=None, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,
                           window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None,
                           sm_margin=0):
    """None: our schedule needs no metadata made ahead. The result may be given as scheduler_metadata."""
    return None
