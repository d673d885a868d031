"""Padded batches to packed rows and back: flash_attn.bert_padding's pad_input and unpad_input, on PyTorch tensors."""

import torch
import torch.nn.functional as F


def index_first_axis(rows, indices):
    """rows[indices] along the first dimension. Differentiable."""
    return rows.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """[first_axis_dim, ...] with values at indices along the first dimension and zeros elsewhere. Differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


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


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """unpad_input where a row of the batch holds several sequences one after another: attention_mask_in_length int [batch,
    seqlen] holds their lengths, in order, and zeros. Returns (rows [total, ...], indices, cu_seqlens int32 [sequences + 1],
    max_seqlen int). Differentiable."""
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    valid = torch.arange(attention_mask_in_length.shape[1], device=lengths.device) < \
        attention_mask_in_length.sum(-1, keepdim=True)
    indices = torch.nonzero(valid.flatten(), as_tuple=False).flatten()
    cu_seqlens = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states, indices, batch, seqlen):
    """The inverse: rows [total, ...] to [batch, seqlen, ...], zeros where there was padding. Differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
