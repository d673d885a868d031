"""torch.nn.functional.scaled_dot_product_attention's signature on flashattn, and a context manager that routes it here."""

import contextlib
import math
import threading

import torch

from . import _native
from .torch_ops import attention, attention_heads_first

# On any device: quicker to ask than each. PyTorch 2.4 has no such question.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_is_compiling = torch.compiler.is_compiling


def _four(t, lead):
    """[..., heads, rows, d] as [batch, heads, rows, d], the leading dimensions broadcast to lead."""
    if t.dim() == 2:
        t = t.unsqueeze(0)
    return t.expand(*lead, *t.shape[-3:]).flatten(0, -4) if lead else t.unsqueeze(0)


# -inf as an integer of as many bits.
_BITS = {torch.bfloat16: (torch.int16, -0x80), torch.float16: (torch.int16, -0x400), torch.float32: (torch.int32, -0x800000)}


def added(sees, dtype):
    """0 where a boolean mask is True, else -inf. On a GPU rows begin at multiples of 16 bytes, which Hopper's own kernels ask for."""
    keys = sees.shape[-1]
    if sees.is_cuda and keys % 8:
        sees = torch.nn.functional.pad(sees, (0, -keys % 8))
    dtype = dtype if dtype in _BITS else torch.float32  # FP8's
    number, minus_inf = _BITS[dtype]
    return ((sees.to(number) - 1) & minus_inf).view(dtype)[..., :keys]  # a fifth of what masked_fill takes on a CPU; not in place, which vmap does not do


def bias_of(attn_mask, query):
    """An additive mask; a boolean one is True where a key takes part. Of torch.nn.attention.bias's, whose own numbers mean nothing, what they stand for."""
    if type(attn_mask) is not torch.Tensor and hasattr(attn_mask, "_materialize"):
        attn_mask = attn_mask._materialize(query.device)
    if attn_mask.dtype == torch.bool:
        return added(attn_mask, query.dtype)
    if attn_mask.dtype not in (query.dtype, torch.float32):
        raise _native.InvalidError(f"attn_mask has dtype {attn_mask.dtype}: expected bool, float32 or {query.dtype}")
    return attn_mask


def _bias_four(bias, lead, keys):
    """An additive mask [b or 1, h or 1, sq or 1, sk] of one that broadcasts to [..., heads, L, S]."""
    bias = bias[(None,) * (4 - bias.dim())]
    if bias.shape[-1] not in (1, keys):
        raise _native.InvalidError(f"attn_mask has {bias.shape[-1]} columns: expected 1, or {keys}, the keys")
    bias = bias.expand(*bias.shape[:-1], keys)
    if math.prod(bias.shape[:-3]) == 1:
        return bias.view(1, *bias.shape[-3:]) if bias.dim() == 4 else bias.flatten(0, -4)
    return _four(bias, lead)


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """query [..., heads_q, L, d], key [..., heads_k, S, d], value [..., heads_k, S, dv] -> [..., heads_q, L, dv].

    As PyTorch has it: attn_mask is boolean (True: takes part) or added, broadcastable to [..., heads_q, L, S], and
    differentiable; is_causal is aligned top left and excludes attn_mask; heads_q != heads_k needs enable_gqa. A row
    that sees nothing gives 0.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError("sdpa: attn_mask and is_causal=True exclude each other")
    if attn_mask is None and not dropout_p and not _is_compiling() and not _any_autocast() and \
            query.dim() == key.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0] and \
            (enable_gqa or query.shape[1] == key.shape[1]) and (not is_causal or query.shape[2] == key.shape[2]):
        out = attention_heads_first(query, key, value, scale, is_causal)
        if out is not None:
            return out
    if torch.is_autocast_enabled(query.device.type):  # PyTorch's own is on autocast's list
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, attn_mask = (t.to(dtype) if t is not None and t.dtype == torch.float32 else t
                                        for t in (query, key, value, attn_mask))
    q, k, v, lead = query, key, value, None
    if not q.dim() == k.dim() == v.dim() == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        if min(q.dim(), k.dim(), v.dim()) < 2:
            raise _native.InvalidError(f"sdpa: {q.dim()}, {k.dim()}, {v.dim()} dimensions: expected at least 2")
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        q, k, v = _four(q, lead), _four(k, lead), _four(v, lead)
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise RuntimeError(f"sdpa: {q.shape[1]} query heads and {k.shape[1]} key heads need enable_gqa=True")
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    rows, keys = q.shape[1], k.shape[1]
    window, causal = (-1, -1), False
    if is_causal:
        if keys > rows:  # top left: query i sees keys 0 .. i, so keys from L on are never seen
            k, v, causal = k[:, :rows], v[:, :rows], True
        elif keys < rows:  # our diagonal is shifted by S - L; shift it back
            window = (-1, rows - keys)
        else:
            causal = True
    bias = None
    if attn_mask is not None:
        bias = _bias_four(bias_of(attn_mask, query), q.shape[:1] if lead is None else lead, keys)
    out = attention(q, k, v, bias=bias, scale=scale, causal=causal, window=window, dropout_p=dropout_p,
                    want_lse=False)[0].transpose(1, 2)
    return out if lead is None else out.reshape(*lead, *query.shape[-3:-1], value.shape[-1])


_theirs = torch.nn.functional.scaled_dot_product_attention
_lock, _depth = threading.Lock(), 0


@contextlib.contextmanager
def use_for_sdpa():
    """Within the block, torch.nn.functional.scaled_dot_product_attention is flashattn's, in all threads. What we
    cannot do raises; nothing falls back."""
    global _depth
    with _lock:
        _depth += 1
        torch.nn.functional.scaled_dot_product_attention = sdpa
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                torch.nn.functional.scaled_dot_product_attention = _theirs
