"""Hugging Face transformers on flashattn:

    import flashattn.transformers
    flashattn.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="fattn")

The name holds no "flash", since transformers takes every name with that word for the flash_attn package. register()
also registers a mask function of the same name: without one, transformers drops padding masks silently.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from . import _native
from .sdpa import bias_of
from .torch_ops import attention


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                      position_bias=None, softcap=None, s_aux=None, **kwargs):
    """An attention function of transformers: query [batch, heads_q, rows, d], key and value [batch, heads_k, keys, d or
    dv], attention_mask None or [batch, 1 or heads_q, rows, keys], boolean (True: takes part) or added. s_aux [heads_q]
    are sinks. Returns (out [batch, rows, heads_q, dv], None). A sliding window is in the mask already."""
    if kwargs.get("output_attentions"):
        raise _native.UnsupportedError("output_attentions is not supported: the probabilities are never stored; load the "
                                       "model with attn_implementation='eager'")
    if kwargs.get("cache") is not None:
        raise _native.UnsupportedError("continuous batching's paged cache is not supported by this attention function")
    rows, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    lengths = _lengths_of(attention_mask) if position_bias is None and attention_mask is not None else None
    if lengths is not None:
        attention_mask, is_causal = None, False
    causal = bool(is_causal) and rows > 1 and attention_mask is None
    if causal and keys > rows:  # prefill of a static cache: keys from `rows` on are not written yet
        key, value = key[:, :, :rows], value[:, :, :rows]
        position_bias = position_bias[..., :rows] if position_bias is not None else None
    bias = bias_of(attention_mask, query) if attention_mask is not None else None
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(query.dtype)
    sinks = s_aux if s_aux is None or s_aux.dtype == torch.float32 else s_aux.to(query.dtype)
    out, _, _ = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias=bias, sinks=sinks,
                          seqused_k=lengths, scale=scaling, causal=causal, softcap=softcap or 0.0, dropout_p=dropout,
                          want_lse=False)
    return out, None


def _note_lengths(mask, padding):
    """Remember on a mask that all it says is how long each sequence is: what is padded is then not computed at all."""
    lengths = padding.sum(1, dtype=torch.int32)
    if torch.equal(torch.arange(padding.shape[1], device=padding.device) < lengths.unsqueeze(1), padding):
        mask.flashattn_lengths = lengths, mask._version


def _lengths_of(mask):
    """The lengths noted on this very mask, int32 [batch]; None if there are none or the mask was written to since."""
    if torch.compiler.is_compiling():
        return None
    lengths, version = getattr(mask, "flashattn_lengths", (None, None))
    return lengths if lengths is not None and version == mask._version else None


def attention_mask(*args, dtype=torch.float32, mask_function=None, **kwargs):
    """A mask function of transformers: None where causal or no masking is enough, else an additive mask [batch, 1, rows,
    keys] of 0 and -inf in dtype, made once for all layers. Padding alone is one row, broadcast."""
    rows = kwargs.get("q_length")
    one_row = mask_function is bidirectional_mask_function and rows is not None and not kwargs.get("use_vmap")
    if one_row:
        kwargs["q_length"] = 1
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    sees = sdpa_mask(*args, **kwargs)
    if sees is None:
        return None
    if not is_tracing(sees) and torch.is_inference_mode_enabled():  # whose tensors have no version to tell a later write by
        with torch.inference_mode(False):
            return _added(sees, dtype, rows, one_row)
    return _added(sees, dtype, rows, one_row)


def _added(sees, dtype, rows, one_row):
    bias = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))
    if one_row:
        bias = bias.expand(-1, -1, rows, -1)
        if not is_tracing(bias):
            _note_lengths(bias, sees[:, 0, 0])
    return bias


def register(name="fattn"):
    """Make attn_implementation=name run on flashattn."""
    if "flash" in name:
        raise _native.InvalidError(f"name '{name}' holds 'flash', which transformers takes for the flash_attn package")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
