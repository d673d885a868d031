"""Block masks: attention of pairs that slices show, in kernels that skip what none does (the library's flash_attn_slice; MagiAttention's
AttnSlice is the same, FlexAttention's BlockMask the nearest in PyTorch).

    mask = masks.documents([300, 500, 224])
    out = flash_attn_masked_func(q, k, v, mask)

A mask is made once, on the host, and costs nothing to keep. `a | b` shows what either shows; causal and window_size of a call take away
from it. Tensors may be PyTorch's (differentiable), NumPy's or anything with DLPack.
"""

import sys

import numpy as np

from . import _native
from ._arrays import is_torch
from .interface import _attend

FULL, CAUSAL, INVERSE_CAUSAL, BOTH = range(4)  # kinds: all pairs of a slice; j - k_end <= i - q_end; j - k_begin >= i - q_begin; both


class BlockMask:
    """What slices show, each (q_begin, q_end, k_begin, k_end, kind): queries [q_begin, q_end) on keys [k_begin, k_end). `lists`: one
    list of slices for all sequences of a batch, or with own True one for each."""

    def __init__(self, lists, own=False):
        self.lists = [[tuple(int(x) for x in slice_) for slice_ in one] for one in lists]
        self.own = own
        wrong = next((s for one in self.lists for s in one if len(s) != 5), None)
        if wrong is not None:
            raise _native.InvalidError(f"a slice is {wrong}: expected (q_begin, q_end, k_begin, k_end, kind)")
        if not own and len(self.lists) != 1:
            raise _native.InvalidError(f"{len(self.lists)} lists of slices: expected one for all sequences, or own=True")
        self._arrays = {}

    def __or__(self, other):
        if not isinstance(other, BlockMask):
            return NotImplemented
        count = max(len(self.lists), len(other.lists))
        sides = [m.lists if m.own else m.lists * count for m in (self, other)]
        if len(sides[0]) != len(sides[1]):
            raise _native.InvalidError(f"the masks are of {len(sides[0])} and {len(sides[1])} sequences: expected as many")
        return BlockMask([a + b for a, b in zip(*sides)], self.own or other.own)

    def __repr__(self):
        slices = sum(map(len, self.lists))
        return f"BlockMask({slices} slices" + (f" of {len(self.lists)} sequences)" if self.own else ")")

    def dense(self, seqlen_q, seqlen_k):
        """bool [sequences or 1, seqlen_q, seqlen_k] (NumPy): to look at, and to check against."""
        i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
        shown = np.zeros((len(self.lists), seqlen_q, seqlen_k), dtype=bool)
        for seen, one in zip(shown, self.lists):
            for q_begin, q_end, k_begin, k_end, kind in one:
                pairs = (i >= q_begin) & (i < q_end) & (j >= k_begin) & (j < k_end)
                if kind & CAUSAL:
                    pairs &= j - k_end <= i - q_end
                if kind & INVERSE_CAUSAL:
                    pairs &= j - k_begin >= i - q_begin
                seen |= pairs
        return shown

    def arrays(self, torch=None):
        """(slices int32 [n, 5], offsets int32 [batch + 1] or None) in host memory, of NumPy or of this torch."""
        kind = "numpy" if torch is None else "torch"
        if kind not in self._arrays:
            all_slices = [s for one in self.lists for s in one]
            if not all_slices:  # no slice is no mask to the library
                all_slices = [(0, 0, 0, 0, FULL)]
                offsets = [0] * len(self.lists) + [1]
            else:
                offsets = np.cumsum([0, *map(len, self.lists)]).tolist()
            make = (lambda x: np.array(x, dtype=np.int32)) if torch is None else lambda x: torch.tensor(x, dtype=torch.int32, device="cpu")
            self._arrays[kind] = make(all_slices), make(offsets) if self.own else None
        return self._arrays[kind]


# ---- masks ----


def from_slices(slices):
    """A mask of slices (q_begin, q_end, k_begin, k_end, kind), an int array [n, 5] or a list, for all sequences."""
    return BlockMask([slices.tolist() if hasattr(slices, "tolist") else slices])


def per_sequence(masks):
    """Each sequence of a batch its own mask."""
    if any(m.own for m in masks):
        raise _native.InvalidError("a mask is of several sequences already: expected masks of one each")
    return BlockMask([m.lists[0] for m in masks], own=True)


def _ends(lengths):
    if any(n < 0 for n in lengths):
        raise _native.InvalidError(f"a length is {min(lengths)}: expected 0 or more")
    return np.cumsum([0, *lengths]).tolist()


def documents(lengths, causal=True):
    """Documents of these lengths one behind the other, which do not see one another. Rows behind the last are padding: such queries see
    nothing. lengths: ints, or for each sequence of a batch a list of such. Documents of 256 tokens or more on average run as packed
    sequences, on a CPU all."""
    if len(lengths) and hasattr(lengths[0], "__len__"):
        return per_sequence([documents(one, causal) for one in lengths])
    ends = _ends(lengths)
    return BlockMask([[(a, b, a, b, CAUSAL if causal else FULL) for a, b in zip(ends, ends[1:]) if a < b]])


def documents_of(ids, causal=True):
    """As documents, of the document that each token belongs to: an int array [seqlen], or [batch, seqlen], read on the host. Neighbours
    with one number are a document; below 0: padding."""
    ids = np.asarray(ids.tolist() if hasattr(ids, "tolist") else ids)
    if ids.ndim == 2:
        return per_sequence([documents_of(one, causal) for one in ids])
    if ids.ndim != 1:
        raise _native.InvalidError(f"ids has {ids.ndim} dimensions: expected [seqlen] or [batch, seqlen]")
    begins = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    return BlockMask([[(a, b, a, b, CAUSAL if causal else FULL) for a, b in zip(begins, begins[1:]) if a < b and ids[a] >= 0]])


def prefix(length, seqlen):
    """The first `length` keys are seen by all queries, the rest is causal (a prefix LM, T5's and PaliGemma's)."""
    _within("length", length, seqlen)
    return BlockMask([[(0, seqlen, 0, length, FULL), (length, seqlen, length, seqlen, CAUSAL)]])


def shared_question(question, answers):
    """A question of so many tokens and answers of these lengths behind it: each sees the question and itself, causally, and no other
    answer (reward models, DPO, sampling several answers)."""
    ends = [question + end for end in _ends(answers)]
    slices = [(0, question, 0, question, CAUSAL), (question, ends[-1], 0, question, FULL)]
    return BlockMask([slices + [(a, b, a, b, CAUSAL) for a, b in zip(ends, ends[1:])]])


def sinks(count, window, seqlen):
    """Causal: a query sees itself and the window - 1 keys before it, and the first `count` keys (StreamingLLM's attention sinks)."""
    _within("count", count, window)
    first = min(window, seqlen)
    slices = [(0, first, 0, first, CAUSAL)]
    if window < seqlen:
        slices += [(window, seqlen, 1, seqlen, BOTH), (window, seqlen, 0, count, FULL)]
    return BlockMask([slices])


def blocks(table, block_size, seqlen_q, seqlen_k):
    """Block-sparse: bool [rows, columns], the blocks of block_size queries and keys that are seen; neighbours in a row are one slice."""
    table = np.asarray(table.tolist() if hasattr(table, "tolist") else table, dtype=bool)
    expected = (-(-seqlen_q // block_size), -(-seqlen_k // block_size))
    if table.shape != expected:
        raise _native.InvalidError(f"table has shape {table.shape}: expected {expected} for blocks of {block_size}")
    slices = []
    for row, seen in enumerate(table):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], seen, [False])).astype(np.int8)))
        for begin, end in edges.reshape(-1, 2).tolist():
            slices.append((row * block_size, min((row + 1) * block_size, seqlen_q), begin * block_size, min(end * block_size, seqlen_k), FULL))
    return BlockMask([slices])


def _within(name, number, most):
    if not 0 <= number <= most:
        raise _native.InvalidError(f"{name} is {number}: expected 0 to {most}")


# ---- attention ----


def flash_attn_masked_func(q, k, v, mask, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                           alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """As flash_attn_func, of the pairs that a BlockMask shows; causal and window_size, aligned bottom right, take away from these. A
    query that sees no key gets 0 and a softmax_lse of -inf."""
    if not isinstance(mask, BlockMask):
        raise _native.InvalidError(f"mask is {type(mask).__name__}: expected a BlockMask")
    if mask.own and len(mask.lists) != q.shape[0]:
        raise _native.InvalidError(f"the mask is of {len(mask.lists)} sequences but q has {q.shape[0]}")
    slices, offsets = mask.arrays(sys.modules["torch"] if is_torch(q) else None)
    return _attend(q, k, v, dropout_p, return_attn_probs, slices=slices, slice_offsets=offsets, scale=softmax_scale, causal=causal, window=window_size,
                   softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)
