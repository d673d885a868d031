"""Attention as the formula says, in PyTorch: in double for the truth, in the inputs' own precision for the yardstick.

Everything is made on PyTorch's default device, so that `with torch.device("cuda")` runs any of these tests there.
"""

import math

import torch


def seeded(seed):
    """A generator of PyTorch's default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def visible(seqlen_q, seqlen_k, causal=False, window=(-1, -1), query_padding=None, key_padding=None, leftpad=None):
    """bool [batch or 1, 1, seqlen_q, seqlen_k]; paddings: bool [batch, seqlen], True for rows that count."""
    lengths_q = torch.tensor([seqlen_q]) if query_padding is None else query_padding.sum(1)
    lengths_k = torch.tensor([seqlen_k]) if key_padding is None else key_padding.sum(1)
    i = torch.arange(seqlen_q).view(1, -1, 1)
    j = torch.arange(seqlen_k).view(1, 1, -1)
    diagonal = (lengths_k - lengths_q).view(-1, 1, 1)
    sees = (i < lengths_q.view(-1, 1, 1)) & (j < lengths_k.view(-1, 1, 1))
    left, right = window[0], 0 if causal else window[1]
    if right >= 0:
        sees = sees & (j <= i + diagonal + right)
    if left >= 0:
        sees = sees & (j >= i + diagonal - left)
    if leftpad is not None:
        sees = sees & (j >= leftpad.view(-1, 1, 1))
    return sees.unsqueeze(1)


def attention(q, k, v, sees, scale=None, softcap=0.0, bias=None, keep=None, dropout_p=0.0, upcast=True):
    """q [b, sq, hq, d], k [b, sk, hk, d], v [b, sk, hk, dv] -> out [b, sq, hq, dv], lse [b, hq, sq]. upcast False: every
    step in the inputs' dtype."""
    dtype = q.dtype
    if upcast:
        q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    scores = scores.masked_fill(~sees, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    seen = (scores > -math.inf).any(-1, keepdim=True)
    probs = torch.softmax(scores.masked_fill(~seen, 0.0), dim=-1).masked_fill(~sees, 0.0)
    if keep is not None:
        probs = probs * keep / (1 - dropout_p)
    out = torch.einsum("bhij,bjhd->bihd", probs, v)
    return out if upcast else out.to(dtype), lse


def alibi_bias(slopes, seqlen_q, seqlen_k, diagonal=None):
    """[batch or 1, heads, seqlen_q, seqlen_k] in double."""
    slopes = slopes.double().view(-1 if slopes.dim() == 2 else 1, slopes.shape[-1], 1, 1)
    diagonal = torch.tensor([seqlen_k - seqlen_q]) if diagonal is None else diagonal
    i = torch.arange(seqlen_q).view(1, 1, -1, 1)
    j = torch.arange(seqlen_k).view(1, 1, 1, -1)
    return -slopes * (i + diagonal.view(-1, 1, 1, 1) - j).abs()


def assert_close(ours, truth, plain, what, factor=2):
    """16-bit: at most `factor` times the error of plain attention in the same precision plus one rounding; float32: 1e-5."""
    assert ours.shape == truth.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    if truth.numel() == 0:
        return
    largest = max(1.0, truth.abs().max().item())
    error = (ours.double() - truth).abs().max().item()
    if ours.dtype == torch.float32:
        bound = 1e-5 * largest
    else:
        rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[ours.dtype] * largest
        bound = factor * (plain.double() - truth).abs().max().item() + rounding
    assert error <= bound, f"{what}: error {error:.3g}, allowed {bound:.3g}"  # NaN fails


def assert_same(ours, expected, what="gradient", roundings=1):
    """Bit for bit on the CPU. A GPU adds the parts of dQ in the order in which they come: there to within a rounding, and
    more where two kernels, each with its own rounding of P, are compared."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype, what
    if ours.is_cpu:
        assert torch.equal(ours, expected), what
    elif ours.numel():
        step = roundings * {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(ours.dtype, 2.0**-20)
        a, b = ours.double(), expected.double()
        bound = step * b.abs() + step * b.abs().max() / 16
        assert ((a - b).abs() <= bound).all(), f"{what}: {((a - b).abs() - bound).max().item():.3g} beyond {roundings} roundings"
