"""torch.nn.functional.scaled_dot_product_attention's signature on flashattn, and a context manager that routes it here."""

import contextlib
import threading

import torch

from . import _native
from .torch_ops import attention


def _four(t):
    """[..., heads, rows, d] as [batch, heads, rows, d]."""
    if t.dim() < 2:
        raise _native.InvalidError(f"sdpa: {t.dim()} dimensions: expected at least 2")
    if t.dim() <= 4:
        return t[(None,) * (4 - t.dim())]
    return t.flatten(0, -4)


def _bias_of(attn_mask, query):
    """An additive bias [b or 1, h or 1, sq or 1, sk]; a boolean mask is True where a key takes part."""
    if attn_mask.dtype == torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=attn_mask.device)
        attn_mask = zeros.masked_fill_(~attn_mask, float("-inf"))
    if attn_mask.dtype not in (query.dtype, torch.float32):
        raise _native.InvalidError(f"attn_mask has dtype {attn_mask.dtype}: expected bool, float32 or {query.dtype}")
    return attn_mask


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """query [..., heads_q, L, d], key [..., heads_k, S, d], value [..., heads_k, S, dv] -> [..., heads_q, L, dv].

    As PyTorch has it: attn_mask is boolean (True: takes part) or added, broadcastable to [..., heads_q, L, S], and
    differentiable; is_causal is aligned top left and excludes attn_mask; heads_q != heads_k needs enable_gqa. A row
    that sees nothing gives 0.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError("sdpa: attn_mask and is_causal=True exclude each other")
    q, k, v = _four(query), _four(key), _four(value)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise RuntimeError(f"sdpa: {q.shape[1]} query heads and {k.shape[1]} key heads need enable_gqa=True")
    batch = torch.broadcast_shapes(q.shape[:1], k.shape[:1], v.shape[:1])[0]
    q, k, v = (t.expand(batch, -1, -1, -1).transpose(1, 2) for t in (q, k, v))
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
        bias = _four(_bias_of(attn_mask, query))
        if bias.shape[-1] != keys:
            bias = bias.expand(*bias.shape[:-1], keys)
        if not any(bias.stride()) and bias.numel() > 1:
            bias = bias.contiguous()
    out, _, _ = attention(q, k, v, bias=bias, scale=scale, causal=causal, window=window, dropout_p=dropout_p)
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


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
