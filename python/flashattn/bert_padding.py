"""Padded batches to packed rows and back: flash_attn.bert_padding's pad_input and unpad_input, on PyTorch tensors."""

import torch
import torch.nn.functional as F


def index_first_axis(rows, indices):
    """rows[indices] along the first dimension. Differentiable."""
    return rows.index_select(0, indices)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """hidden_states [batch, seqlen, ...], attention_mask bool or int [batch, seqlen], 1 for a valid row; unused_mask
    likewise, for rows to keep that are allocated but not used. Returns (rows [total, ...], indices int64 [total] into
    batch * seqlen, cu_seqlens int32 [batch + 1], max_seqlen int, used int32 [batch]). Differentiable."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    cu_seqlens = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states, indices, batch, seqlen):
    """The inverse: rows [total, ...] to [batch, seqlen, ...], zeros where there was padding. Differentiable."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
