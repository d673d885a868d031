"""FlashAttention-3's attention_chunk and qv, said with what the C call has: a block mask, and a longer head_dim."""

import sys

import numpy as np

from . import _native
from ._arrays import is_torch


def host_list(array):
    """The numbers of an array of lengths on any device; None of None."""
    return None if array is None else array.tolist()


def _lengths(q, lengths):
    """int64 [batch or 1, 1] in host memory, of q's kind, of an int or of [batch]."""
    if is_torch(q):
        torch = sys.modules["torch"]
        if is_torch(lengths):
            return lengths.to(device="cpu", dtype=torch.int64).view(-1, 1)
        return torch.tensor([[lengths]], dtype=torch.int64, device="cpu")
    return np.asarray(lengths, dtype=np.int64).reshape(-1, 1)


def chunk_slices(q, chunk, seqlen_q, seqlen_k, batch=1, leftpad=None):
    """The block mask of chunked attention, (slices int32 [n, 5], offsets int32 [batch + 1] or None), of q's kind in host
    memory. Keys, counted from leftpad on, fall into chunks of `chunk`; query i, whose position is i + seqlen_k - leftpad -
    seqlen_q, sees the keys of its own chunk only. seqlen_q, seqlen_k: an int for all sequences, or [batch]; such lengths and
    leftpad are read on the host."""
    if chunk < 0:
        raise _native.InvalidError(f"attention_chunk is {chunk}: expected 0, no chunks, or more")
    torch = sys.modules["torch"] if is_torch(q) else None
    xp, on_host = (torch, {"device": "cpu"}) if torch else (np, {})
    equal = leftpad is None and isinstance(seqlen_q, int) and isinstance(seqlen_k, int)
    rows, keys = _lengths(q, seqlen_q), _lengths(q, seqlen_k)
    pad = _lengths(q, 0 if leftpad is None else leftpad)
    shift = keys - pad - rows  # the position of query 0
    zero = xp.zeros_like(shift)
    longest = seqlen_q if isinstance(seqlen_q, int) else max(host_list(seqlen_q), default=0)
    count = -(-longest // chunk) + 1  # so many chunks can that many positions meet
    # [batch or 1, count]: the first positions of the chunks
    begin = (xp.maximum(shift, zero) // chunk + xp.arange(count, **on_host)) * chunk

    def within(position, limit):
        return xp.minimum(xp.maximum(position, 0 * position), limit + 0 * position)

    sides = (within(begin - shift, rows), within(begin + chunk - shift, rows), within(begin + pad, keys),
             within(begin + chunk + pad, keys), 0 * begin)  # kind 0: all pairs of the slice; empty ones hold none
    slices = xp.stack(sides, -1).reshape(-1, 5)
    slices = slices.to(torch.int32) if torch else slices.astype(np.int32)
    if equal:
        return slices, None
    if begin.shape[0] != batch:
        raise _native.InvalidError(f"the lengths are of {begin.shape[0]} sequences: expected {batch}")
    offsets = xp.arange(batch + 1, **on_host) * count
    return slices, offsets.to(torch.int32) if torch else offsets.astype(np.int32)


def join_qv(q, k, v, qv):
    """(q || qv, k || v): scores q.k + qv.v are those of one product. The second is a view where k and v lie side by side in one
    buffer, as a latent cache has them, and no gradient is wanted; else it is copied."""
    head_dim, head_dim_v = k.shape[-1], v.shape[-1]
    if tuple(qv.shape) != (*q.shape[:-1], head_dim_v):
        raise _native.InvalidError(f"qv has shape {tuple(qv.shape)}: expected {(*q.shape[:-1], head_dim_v)}, q's with v's "
                                   "head_dim")
    if not is_torch(q):
        return np.concatenate([q, qv], -1), np.concatenate([k, v], -1)
    torch = sys.modules["torch"]
    size, wanted = k.element_size(), torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    if not wanted and not torch.compiler.is_compiling() and k.shape[:-1] == v.shape[:-1] and k.stride() == v.stride() and \
            k.stride(-1) == 1 and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
        shape = (*k.shape[:-1], head_dim + head_dim_v)
        if v.data_ptr() + head_dim_v * size == k.data_ptr():
            return torch.cat([qv, q], -1), v.as_strided(shape, v.stride())
        if k.data_ptr() + head_dim * size == v.data_ptr():
            return torch.cat([q, qv], -1), k.as_strided(shape, k.stride())
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)
