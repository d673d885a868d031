"""Hugging Face transformers on flashattn:

    import flashattn.transformers
    flashattn.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="fattn")

The name holds no "flash", since transformers takes every name with that word for the flash_attn package. register()
also registers a mask function of the same name: without one, transformers drops padding masks silently.

    flashattn.transformers.unpad(model)

lets an encoder such as BERT skip the padding of its batches altogether.
"""

import contextvars

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from . import _native
from .bert_padding import pad_input, unpad_input
from .sdpa import added, bias_of
from .torch_ops import attention


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                      position_bias=None, softcap=None, s_aux=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                      max_length_q=None, max_length_k=None, **kwargs):
    """An attention function of transformers: query [batch, heads_q, rows, d], key and value [batch, heads_k, keys, d or
    dv], attention_mask None or [batch, 1 or heads_q, rows, keys], boolean (True: takes part) or added. s_aux [heads_q]
    are sinks. With cu_seq_lens_q int32 [sequences + 1] and no mask the batch is 1 and its rows are sequences one after
    another. Returns (out [batch, rows, heads_q, dv], None). A sliding window is in the mask already."""
    if kwargs.get("output_attentions"):
        raise _native.UnsupportedError("output_attentions is not supported: the probabilities are never stored; load the "
                                       "model with attn_implementation='eager'")
    if kwargs.get("cache") is not None:
        raise _native.UnsupportedError("continuous batching's paged cache is not supported by this attention function")
    rows, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    sinks = s_aux if s_aux is None or s_aux.dtype == torch.float32 else s_aux.to(query.dtype)
    options = dict(sinks=sinks, scale=scaling, softcap=softcap or 0.0, dropout_p=dropout, want_lse=False)
    if cu_seq_lens_q is not None and attention_mask is None:
        if position_bias is not None or query.shape[0] != 1 or kwargs.get("sliding_window"):
            raise _native.UnsupportedError("cu_seq_lens_q needs a batch of 1, no position_bias and no sliding window")
        cu_seq_lens_q.flashattn_used = True
        out, _, _ = attention(*(t[0].transpose(0, 1) for t in (query, key, value)), causal=bool(is_causal),
                              cu_seqlens_q=cu_seq_lens_q, max_seqlen_q=int(max_length_q or 0),
                              cu_seqlens_k=cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k,
                              max_seqlen_k=int(max_length_k or max_length_q or 0), **options)
        return out.unsqueeze(0), None
    if cu_seq_lens_q is not None:
        _check_apart(attention_mask, cu_seq_lens_q)
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
    out, _, _ = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias=bias, seqused_k=lengths,
                          causal=causal, **options)
    return out, None


def _check_apart(mask, cu_seq_lens):
    """Where there is a mask, it is what says which sequences there are; cu_seq_lens alone would be lost."""
    first = cu_seq_lens[1:-1].long()
    first = first[(first > 0) & (first < mask.shape[2])]
    seen = mask[..., first, first - 1]
    if bool((seen if seen.dtype == torch.bool else ~torch.isneginf(seen)).any()):
        raise _native.InvalidError("the mask lets the sequences of cu_seq_lens_q see each other: give position_ids, from 0 in "
                                   "every sequence, too")


def _note_lengths(mask, padding):
    """Remember on a mask that all it says is how long each sequence is: what is padded is then not computed at all."""
    if padding.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # to look would be to wait for the GPU, which a graph forbids
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
    bias = added(sees, dtype)
    if one_row:
        bias = bias.expand(-1, -1, rows, -1)
        if not is_tracing(bias):
            _note_lengths(bias, sees[:, 0, 0])
    return bias


_registered = set()


def register(name="fattn"):
    """Make attn_implementation=name run on flashattn."""
    if "flash" in name:
        raise _native.InvalidError(f"name '{name}' holds 'flash', which transformers takes for the flash_attn package")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    _registered.add(name)


# ---- encoders without their padding ----

_hidden_states_wanted = contextvars.ContextVar("flashattn_hidden_states_wanted", default=False)


def _padding_of(mask, hidden):
    """bool [batch, rows], True for what counts, of an added mask that says only that; else None."""
    batch, rows, _ = hidden.shape
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape != (batch, 1, rows, rows) or mask.stride(2) != 0 \
            or mask.dtype == torch.bool:
        return None
    keys = mask[:, 0, 0]
    valid = keys == 0
    return valid if bool((valid | torch.isneginf(keys)).all()) else None


class _Unpadding:
    """The hooks of unpad. What the second needs of the first travels on cu_seq_lens_q, so threads do not meet."""

    def note(self, module, args, kwargs):
        wanted = kwargs.get("output_hidden_states")
        _hidden_states_wanted.set(module.config.output_hidden_states if wanted is None else wanted)

    def before(self, module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        if torch.compiler.is_compiling() or is_tracing(hidden) or _hidden_states_wanted.get() is not False:
            return None
        padding = _padding_of(mask, hidden)
        if padding is None:
            return None
        packed, indices, cu_seqlens, longest, _ = unpad_input(hidden, padding)
        cu_seqlens.flashattn_padding = indices, *hidden.shape[:2]
        kwargs = {**kwargs, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest,
                  "max_length_k": longest}
        for place, (name, value) in enumerate((("hidden_states", packed.unsqueeze(0)), ("attention_mask", None))):
            if place < len(args):
                args = (*args[:place], value, *args[place + 1 :])
            else:
                kwargs[name] = value
        return args, kwargs

    def after(self, module, args, kwargs, output):
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if not hasattr(cu_seqlens, "flashattn_padding"):
            return None
        if not hasattr(cu_seqlens, "flashattn_used"):  # or it would have mixed the sentences
            raise _native.UnsupportedError(f"{type(module).__name__} does not hand cu_seq_lens_q on to its attention: it "
                                           "cannot run without its padding")
        output.last_hidden_state = pad_input(output.last_hidden_state[0], *cu_seqlens.flashattn_padding)
        return output


def unpad(model):
    """Let an encoder with learned positions (BERT, RoBERTa, DistilBERT, ELECTRA and their like), loaded with
    attn_implementation="fattn", run its layers on the valid rows alone: before the first layer the batch is packed, and
    after the last one it is padded again, with zeros. Valid rows come out as they would; only the time for padding goes.
    Batches whose mask says more than padding, compiled models and calls that want hidden_states run as before.
    Differentiable. Returns handles whose remove() undoes it. UnsupportedError for a model that this cannot serve."""
    base = getattr(model, "base_model", model)
    encoder = getattr(base, "encoder", None) or getattr(base, "transformer", None)
    positions = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    if encoder is None or not isinstance(positions, torch.nn.Embedding) or getattr(base.config, "is_decoder", False):
        raise _native.UnsupportedError(f"{type(base).__name__} cannot run without its padding: expected an encoder with "
                                       "learned positions, such as BertModel")
    if base.config._attn_implementation not in _registered:
        raise _native.UnsupportedError(f"the model's attn_implementation is '{base.config._attn_implementation}': load it with "
                                       "the name that register() was given")
    hooks = _Unpadding()
    return [base.register_forward_pre_hook(hooks.note, with_kwargs=True),
            encoder.register_forward_pre_hook(hooks.before, with_kwargs=True),
            encoder.register_forward_hook(hooks.after, with_kwargs=True)]
