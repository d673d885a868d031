"""What both spellings of flash_attn_with_kvcache do: append the new keys to the cache, rotate, attend."""

import numpy as np

from . import _native
from ._arrays import is_torch, view
from ._call import Call, append_kv, int32_array, sides
from ._variants import chunk_slices, host_list, join_qv


def kvcache(q, k_cache, v_cache, k, v, *, block_table=None, **options):
    """(out, softmax_lse or None) of flash_attn_with_kvcache; the arguments have its names, the options the C call's. With
    cu_seqlens_q q is [total_q, heads_q, d], with cu_seqlens_k_new k and v are [total_new, heads_k, d or dv]."""
    try:
        return _kvcache(q, k_cache, v_cache, k, v, block_table=block_table, **options)
    except _native.InvalidError as error:
        if block_table is None or len(block_table.shape) != 2:
            raise
        raise _native.InvalidError(f"{error} (block_table has {block_table.shape[1]} pages of {k_cache.shape[1]} rows for each "
                                   "sequence)") from None


def _kvcache(q, k_cache, v_cache, k, v, *, rotary_cos=None, rotary_sin=None, rotary_interleaved=True, rotary_seqlens=None,
             cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, cu_seqlens_q=None,
             cu_seqlens_k_new=None, seqused_q=None, qv=None, attention_chunk=0, causal=False, window=(-1, -1), want_lse=True,
             out=None, **options):
    if is_torch(q):
        q, k_cache, v_cache = q.detach(), k_cache.detach(), v_cache.detach()
        k, v, qv = (t.detach() if t is not None else None for t in (k, v, qv))
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if isinstance(cache_seqlens, (int, np.integer)):
        if not 0 <= cache_seqlens < 2**31:
            raise _native.InvalidError(f"cache_seqlens is {cache_seqlens}: expected 0 to the rows of the cache")
        cache_seqlens = _full(q, batch, cache_seqlens)
    if (k is None) != (v is None):
        raise _native.InvalidError("k and v must be given together")
    if k is None and rotary_cos is not None:
        raise _native.InvalidError("rotary_cos needs k and v: only new keys are rotated")
    if k is None and cu_seqlens_k_new is not None:
        raise _native.InvalidError("cu_seqlens_k_new needs k and v: it says which rows are a sequence's")
    new, begin_k = None, None
    if k is not None:
        if cache_seqlens is None:
            raise _native.InvalidError("If key is supplied, it must have seqlen <= the seqlen of the KV cache: "
                                       "cache_seqlens must say where k and v go")
        dims = 4 if cu_seqlens_k_new is None else 3
        if len(k.shape) != dims:
            raise _native.InvalidError(f"k has {len(k.shape)} dimensions {tuple(k.shape)}: expected {dims}")
        begin_k = _row_ends(batch, k, cu_seqlens_k_new)
        new = k.shape[1] if begin_k is None else cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1]
    for name, array in (("cache_seqlens", cache_seqlens), ("cache_leftpad", cache_leftpad)):
        if array is not None:  # the C call knows them by other names
            int32_array(array, name, view(q), [], (batch,))
    held = cache_seqlens if k is None else cache_seqlens + new  # when q attends
    if attention_chunk:
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        rows = seqused_q
        if rows is None:
            rows = q.shape[1] if cu_seqlens_q is None else cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        options["slices"], options["slice_offsets"] = chunk_slices(q, attention_chunk, rows, capacity if held is None else held,
                                                                   batch, cache_leftpad)
    rotated = None
    if rotary_cos is not None:
        rotated, q = q, q.clone() if is_torch(q) else q.copy()

    def attention():
        joined = (q, k_cache) if qv is None else join_qv(q, k_cache, v_cache, qv)
        return Call(*joined, v_cache, seqused_k=held, cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad,
                    block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q, causal=causal, window=window,
                    **options)

    call = attention()
    if k is not None:
        # As flash_attn has it, positions count from the cache's first row, padding included, unless rotary_seqlens says where
        # they begin. The C call's leftpad_k is what it takes off.
        back = None if rotary_seqlens is None or rotary_cos is None else cache_seqlens - rotary_seqlens
        both = dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin, interleaved=rotary_interleaved,
                    q_at_end=not causal and max(sides(window)) < 0 and not attention_chunk)
        each = dict(cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, leftpad_k=back, block_table=block_table)
        try:
            call.check_forward(out)  # what attention would refuse must not be in the cache by then
        except _native.InvalidError:
            if view(q).device == _native.CPU:  # the sentence that says what does not fit, if that is it
                _check_room(begin_k, batch, k_cache, k, each)
            raise
        if cu_seqlens_q is None and cu_seqlens_k_new is None:
            append_kv(k_cache, v_cache, k, v, q=rotated, q_out=q if rotated is not None else None, **each, **both)
        else:
            _append_each(batch, k_cache, v_cache, k, v, rotated, q, cu_seqlens_q, begin_k, each, both)
        if qv is not None:  # k and v may have been copied
            call = attention()
    return call.forward(out=out, want_lse=want_lse)


def _full(array, count, value):
    """int32 [count] filled with value, of the kind and device of array."""
    if is_torch(array):
        import torch

        return torch.full((count,), value, dtype=torch.int32, device=array.device)
    return np.full((count,), value, dtype=np.int32)


def _row_ends(batch, k, cu_seqlens_k):
    """cu_seqlens_k on the host, checked; None of None."""
    begin = host_list(cu_seqlens_k)
    if begin is not None and (len(begin) != batch + 1 or any(a > b for a, b in zip(begin, begin[1:])) or
                              (begin[0], begin[-1]) != (0, len(k))):
        given = f"goes from {begin[0]} to {begin[-1]} in {len(begin) - 1} sequences" if begin else "is empty"
        raise _native.InvalidError(f"cu_seqlens_k_new {given}: expected rising from 0 to {len(k)}, the rows of k, in {batch}")
    return begin


def _counts(begin_k, batch, k):
    """How many new keys each sequence has."""
    return [k.shape[1]] * batch if begin_k is None else [b - a for a, b in zip(begin_k, begin_k[1:])]


def _append_each(batch, k_cache, v_cache, k, v, q, q_out, cu_seqlens_q, begin_k, each, both):
    """append_kv one sequence at a time, since the C call appends equally many rows to all. Which rows are a sequence's is read
    on the host. each: options with a row for every sequence; both: the rest."""
    begin_q, table = host_list(cu_seqlens_q), each["block_table"]
    _check_room(begin_k, batch, k_cache, k, each)

    def rows(array, begin, b):
        return None if array is None else array[b : b + 1] if begin is None else array[None, begin[b] : begin[b + 1]]

    for b, count in enumerate(_counts(begin_k, batch, k)):
        of_q = rows(q, begin_q, b), rows(q_out, begin_q, b)
        rotates = q is not None and of_q[0].shape[1] > 0
        if count or rotates:
            entry = slice(b, b + 1) if each["cache_batch_idx"] is None and table is None else slice(None)
            append_kv(k_cache[entry], v_cache[entry], *((rows(k, begin_k, b), rows(v, begin_k, b)) if count else (None, None)),
                      q=of_q[0] if rotates else None, q_out=of_q[1] if rotates else None,
                      **{name: None if a is None else a[b : b + 1] for name, a in each.items()}, **both)


def _check_room(begin_k, batch, k_cache, k, each):
    """What the C call checks of all sequences before it writes the first row: that new rows fit, and that no two are one."""
    held, table, entries = (host_list(each[name]) for name in ("cache_seqlens", "block_table", "cache_batch_idx"))
    page_size = k_cache.shape[1]
    capacity = page_size * (1 if table is None else each["block_table"].shape[1])
    spans = []  # (page or entry, first row, end)
    for b, count in enumerate(_counts(begin_k, batch, k)):
        begin, end = held[b], held[b] + count
        if begin < 0 or end > capacity:
            raise _native.InvalidError(f"cache_seqlens[{b}] is {begin}: expected at least 0 and, with {count} new keys, at most "
                                       f"{capacity}, the rows of the cache")
        if table is None:
            spans.append((b if entries is None else entries[b], begin, end))
            continue
        for page in range(begin // page_size, -(-end // page_size)):
            spans.append((table[b][page], max(begin - page * page_size, 0), min(end - page * page_size, page_size)))
    spans = sorted(span for span in spans if span[1] < span[2])
    for (place, _, end), (other, begin, _) in zip(spans, spans[1:]):
        if place == other and begin < end:
            kind = "entry" if table is None else "page"
            raise _native.InvalidError(f"new keys of two sequences go to row {begin} of {kind} {place} of the cache: expected each to "
                                       "have rows of its own")
