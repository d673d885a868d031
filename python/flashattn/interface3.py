"""FlashAttention-3's spelling (Dao-AILab/flash-attention, hopper/flash_attn_interface.py): the same names, arguments,
defaults and returns. pack_gqa, sm_margin and scheduler_metadata are hints for one GPU's scheduler that never change a result,
and are accepted. attention_chunk and qv have gradients, which they lack there. The names with an underscore are the passes alone,
without autograd, as in flashattn.interface.
"""

import sys

import numpy as np

from . import _native
from ._arrays import is_torch, wants_gradient
from ._call import Call, merge
from ._kvcache import kvcache
from ._variants import chunk_slices, join_qv


def _attend(q, k, v, num_splits=1, descales=(None, None, None), qv=None, attention_chunk=0, out=None, **options):
    """(out, softmax_lse)."""
    described = any(d is not None for d in descales)
    if qv is not None:
        if described:
            raise _native.UnsupportedError("qv with descales is not supported: k and v are read as one array, with one scale")
        q, k = join_qv(q, k, v, qv)
    if attention_chunk:
        options["slices"], options["slice_offsets"] = _chunks(q, k, attention_chunk, **options)
    differentiable = is_torch(q) and wants_gradient(q, k, v)
    if differentiable and described:
        raise _native.UnsupportedError("descales have no gradient: detach q, k and v")
    if out is None and (differentiable or (is_torch(q) and not described and num_splits in (0, 1))):
        from .torch_ops import attention

        return attention(q, k, v, **options)[:2]
    return Call(q, k, v, num_splits=num_splits, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
                **options).forward(out=out)


def _chunks(q, k, attention_chunk, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, **others):
    """The block mask of attention_chunk."""
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    sides = []
    for array, cu_seqlens, used in ((q, cu_seqlens_q, seqused_q), (k, cu_seqlens_k, seqused_k)):
        sides.append(used if used is not None else array.shape[1] if cu_seqlens is None else cu_seqlens[1:] - cu_seqlens[:-1])
    return chunk_slices(q, attention_chunk, *sides, batch)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False):
    """q [batch, seqlen_q, heads_q, d], k and v [batch, seqlen_k, heads_k, d or dv]. qv [batch, seqlen_q, heads_q, dv]: scores are
    q.k + qv.v. attention_chunk: of the keys, in chunks of so many, a query sees those of its own chunk alone, its position being
    that of the mask, aligned bottom right. Descales float32 [batch, heads_k], for float8 inputs. Returns out, or (out,
    softmax_lse [batch, heads_q, seqlen_q])."""
    out, lse = _attend(q, k, v, num_splits, (q_descale, k_descale, v_descale), qv, attention_chunk, scale=softmax_scale,
                       causal=causal, window=window_size, softcap=softcap, deterministic=deterministic)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
                              num_heads_q=None, sm_margin=0, return_attn_probs=False):
    """qkv [batch, seqlen, 3, heads, d], or [batch, seqlen, heads_q + 2 heads_k, d] with num_heads_q."""
    if len(qkv.shape) == 5:
        q, k, v = qkv.unbind(2) if is_torch(qkv) else (qkv[:, :, n] for n in range(3))
    else:
        if num_heads_q is None:
            raise _native.InvalidError("a packed qkv of 4 dimensions needs num_heads_q")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = (qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k],
                   qkv[:, :, num_heads_q + heads_k :])
    out, lse = _attend(q, k, v, 1, (q_descale, k_descale, v_descale), None, attention_chunk, scale=softmax_scale, causal=causal,
                       window=window_size, softcap=softcap, deterministic=deterministic)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """q [total_q, heads_q, d], k and v [total_k, heads_k, d or dv]; cu_seqlens int32 [batch + 1], seqused int32 [batch].
    Returns out, or (out, softmax_lse [heads_q, total_q])."""
    out, lse = _attend(q, k, v, num_splits, (q_descale, k_descale, v_descale), qv, attention_chunk, scale=softmax_scale,
                       causal=causal, window=window_size, softcap=softcap, deterministic=deterministic,
                       cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
                       max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return (out, lse) if return_attn_probs else out


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
    """As flash_attn's flash_attn_with_kvcache; page_table is its block_table. With cu_seqlens_q q is [total_q, heads_q, d], with
    cu_seqlens_k_new k and v are [total_new, heads_k, d or dv]: new keys of as many lengths as there are sequences, which are then
    read on the host. rotary_seqlens int32 [batch], at most cache_seqlens: the rotary position of the first new key, in place of
    cache_seqlens. qv and attention_chunk as in flash_attn_func; for qv the whole cache is copied unless k_cache and v_cache lie
    side by side in one buffer. Returns out, or (out, softmax_lse)."""
    out, lse = _with_cache(q, k_cache, v_cache, k, v, page_table=page_table, cache_batch_idx=cache_batch_idx,
                           descales=(q_descale, k_descale, v_descale), qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                           rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens, cache_seqlens=cache_seqlens,
                           cache_leftpad=cache_leftpad, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
                           max_seqlen_q=max_seqlen_q or 0, scale=softmax_scale, causal=causal, window=window_size,
                           attention_chunk=attention_chunk, softcap=softcap, num_splits=num_splits,
                           want_lse=return_softmax_lse)
    return (out, lse) if return_softmax_lse else out


def _with_cache(q, k_cache, v_cache, k, v, page_table, cache_batch_idx, descales, qv, **options):
    if qv is not None and any(d is not None for d in descales):
        raise _native.UnsupportedError("qv with descales is not supported: k and v are read as one array, with one scale")
    if page_table is not None and cache_batch_idx is not None:  # FlashAttention-3's alone: the rows of the table are looked up
        page_table = page_table[cache_batch_idx.long() if is_torch(cache_batch_idx) else cache_batch_idx]
        cache_batch_idx = None
    return kvcache(q, k_cache, v_cache, k, v, block_table=page_table, cache_batch_idx=cache_batch_idx, qv=qv,
                   q_descale=descales[0], k_descale=descales[1], v_descale=descales[2], **options)


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=None, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,
                           window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None,
                           sm_margin=0):
    """None: our schedule needs no metadata made ahead. The result may be given as scheduler_metadata."""
    return None


# ---- the passes alone, on PyTorch tensors ----


def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                        causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
                        rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):
    """All forwards in one: (out, softmax_lse, and two empty tensors where theirs has the parts of split keys). out_: where to
    write out. With k_new, page_table, kv_batch_idx or leftpad_k k and v are a cache, of which seqused_k is held."""
    options = dict(scale=softmax_scale, causal=causal, window=(window_size_left, window_size_right), softcap=softcap,
                   attention_chunk=attention_chunk, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q or 0,
                   seqused_q=seqused_q, descales=(q_descale, k_descale, v_descale), qv=qv, num_splits=num_splits, out=out_)
    if k_new is page_table is kv_batch_idx is leftpad_k is None:
        with sys.modules["torch"].no_grad():
            out, lse = _attend(q, k, v, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, max_seqlen_k=max_seqlen_k or 0, **options)
    else:
        if cu_seqlens_k is not None:
            raise _native.UnsupportedError("cu_seqlens_k with a cache is not supported: give seqused_k")
        out, lse = _with_cache(q, k, v, k_new, v_new, page_table, kv_batch_idx, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                               rotary_interleaved=rotary_interleaved, rotary_seqlens=seqlens_rotary, cache_seqlens=seqused_k,
                               cache_leftpad=leftpad_k, cu_seqlens_k_new=cu_seqlens_k_new, **options)
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                         max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None,
                         is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False,
                         sm_margin=0):
    """As flashattn.interface._flash_attn_backward, or with cu_seqlens _flash_attn_varlen_backward."""
    from .torch_ops import backward_pass

    return backward_pass(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                         seqused_q=sequed_q, seqused_k=sequed_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                         scale=softmax_scale, causal=is_causal, window=(window_size_left, window_size_right), softcap=softcap,
                         deterministic=deterministic)
