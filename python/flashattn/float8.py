"""FP8 copies of q, k and v, for the functions that take FP8 inputs with descales (flashattn.interface3)."""

import sys

import numpy as np

from . import _native
from ._arrays import is_torch, numpy_dtype

_LARGEST = 448.0  # of E4M3


def _signs(count, seed):
    return np.random.default_rng(seed).integers(0, 2, count).astype(np.float32) * 2 - 1


def _rotated(x, module, seed):
    """x times a diagonal of random signs, then a Hadamard matrix over 1 / sqrt(its size): of head_dim's largest power of 2, again and again."""
    d, size = x.shape[-1], x.shape[-1] & -x.shape[-1]
    signs = _signs(d, seed)
    x, step = x * (module.as_tensor(signs, device=x.device) if is_torch(x) else signs), 1
    while step < size:
        pairs = x.reshape(*x.shape[:-1], d // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x, step = module.stack((a + b, a - b), -2).reshape(x.shape), 2 * step
    return x * size**-0.5


def _scaled(x, groups, dtype):
    """FP8 and [batch, groups] descales."""
    grouped = x.reshape(x.shape[0], x.shape[1], groups, -1)
    largest = abs(grouped).amax((1, 3)) if is_torch(x) else abs(grouped).max((1, 3), initial=0.0)
    descale = largest / _LARGEST + (largest == 0)
    scaled = (grouped / descale[:, None, :, None]).reshape(x.shape)
    return (scaled.to(dtype) if is_torch(x) else scaled.astype(dtype)), descale


def quantize(q, k, v, hadamard=False, seed=0):
    """(q, k, v) in FP8 (E4M3) and their descales, (q_descale, k_descale, v_descale), float32 [batch, heads_k]: of each batch entry and key head the
    largest number becomes 448. q [batch, seqlen_q, heads_q, head_dim], k and v [batch, seqlen_k, heads_k, ...]: PyTorch tensors of any device, or
    NumPy arrays (with the package ml_dtypes); finite, with at least one row.

    hadamard: q and k are multiplied with one random orthogonal matrix, of signs by `seed` and a Hadamard matrix. It takes nothing from the scores and deals an outlier out over
    all of head_dim, so that it does not make the rest of its head small and coarse. k's of one cache must all be made with one seed, and q's to go with them.

        (q8, k8, v8), (dq, dk, dv) = float8.quantize(q, k, v, hadamard=True)
        out, lse = interface3.flash_attn_func(q8, k8, v8, q_descale=dq, k_descale=dk, v_descale=dv, return_attn_probs=True)
    """
    torch = sys.modules["torch"] if is_torch(q) else None
    groups = k.shape[2] if len(k.shape) == 4 else 0
    if groups < 1 or len(q.shape) != 4 or len(v.shape) != 4 or q.shape[2] % groups or v.shape[2] != groups:
        raise _native.InvalidError(f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, expected [batch, seqlen, heads, head_dim] "
                                   "with heads of q a multiple of those of k and v")
    dtype = torch.float8_e4m3fn if torch else numpy_dtype(_native.F8E4M3)
    wide = [t.detach().float() if torch else t.astype(np.float32) for t in (q, k, v)]
    if hadamard:
        wide[:2] = [_rotated(t, torch or np, seed) for t in wide[:2]]
    made = [_scaled(t, groups, dtype) for t in wide]
    return tuple(t for t, _ in made), tuple(descale for _, descale in made)
