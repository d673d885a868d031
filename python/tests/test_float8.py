"""FP8 copies with descales, and what rotating q and k first is for."""

import flashattn
import numpy as np
import pytest
import torch
from flashattn import float8, interface3

F8 = torch.float8_e4m3fn


def outliers(*shape, seed):
    """N(0, 1), and N(0, 100) besides with probability 0.001; on the default device, the same numbers on each."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape) + 10 * draw.standard_normal(shape) * (draw.random(shape) < 1e-3)
    return torch.tensor(x, dtype=torch.float32)


def attended(made):
    (q, k, v), (q_descale, k_descale, v_descale) = made
    return interface3.flash_attn_func(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale).float()


def widened(tensor, descale):
    """What a tensor's FP8 stands for; descale [batch, groups]."""
    return tensor.float() * descale.repeat_interleave(tensor.shape[2] // descale.shape[1], 1)[:, None, :, None]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_each_heads_largest_is_448(kind):
    q, k, v = (outliers(2, 40, heads, 64, seed=heads).to(kind) * 3 for heads in (4, 2, 2))
    k[1, :, 1] = 0  # a head of zeros stays so
    (q8, k8, v8), descales = float8.quantize(q, k, v)
    for exact, found, descale in zip((q, k, v), (q8, k8, v8), descales):
        assert found.dtype == F8 and descale.dtype == torch.float32 and descale.shape == (2, 2)
        grouped = found.float().reshape(2, 40, 2, -1).abs().amax((1, 3))
        assert ((grouped == 448) | (grouped == 0)).all()
        error = (widened(found, descale) - exact.float()).abs()
        assert (error <= exact.float().abs() * 2**-4 + widened(torch.full_like(found.float(), 2.0**-10), descale)).all()
    assert (k8[1, :, 1].float() == 0).all()


@pytest.mark.parametrize("d", [64, 96, 128])
def test_rotation_leaves_the_scores(d):
    q, k = outliers(1, 50, 1, d, seed=1), outliers(1, 60, 1, d, seed=2)
    turned = [float8._rotated(t, torch, 5)[0, :, 0].double() for t in (q, k)]
    assert torch.allclose(turned[0] @ turned[1].T, q[0, :, 0].double() @ k[0, :, 0].double().T, atol=1e-3)
    assert torch.allclose(turned[0].norm(dim=1), q[0, :, 0].double().norm(dim=1), rtol=1e-5)
    assert turned[0].abs().max() < q.abs().max()
    assert not torch.allclose(float8._rotated(q, torch, 6)[0, :, 0].double(), turned[0])


def test_rotation_makes_outliers_harmless():
    q, k, v = (outliers(1, 512, 2, 128, seed=seed) for seed in (1, 2, 3))
    exact = flashattn.flash_attn_func(q, k, v)
    plain, turned = ((attended(float8.quantize(q, k, v, hadamard=hadamard)) - exact).pow(2).mean().sqrt() for hadamard in (False, True))
    assert turned < (0.85 if q.is_cpu else 0.9) * plain and turned < 0.01  # on a GPU P is FP8 too, and not rotated


def test_numpy_makes_the_same():
    pytest.importorskip("ml_dtypes")
    q, k, v = (outliers(2, 30, heads, 96, seed=heads).cpu() for heads in (4, 2, 2))
    for hadamard in (False, True):
        ours, descales = float8.quantize(q.numpy(), k.numpy(), v.numpy(), hadamard=hadamard)
        others, expected = float8.quantize(q, k, v, hadamard=hadamard)
        for a, b in zip(descales, expected):
            assert a.dtype == np.float32 and np.allclose(a, b.numpy(), rtol=1e-6)
        for a, b in zip(ours, others):
            assert np.allclose(a.astype(np.float32), b.float().numpy(), rtol=2**-3, atol=2**-9)


def test_shapes_that_do_not_fit_are_refused():
    q, k = torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 2, 64)
    with pytest.raises(flashattn.InvalidError, match="multiple"):
        float8.quantize(q, k, k)
    with pytest.raises(flashattn.InvalidError, match="expected"):
        float8.quantize(q[0], k, k)
    with pytest.raises(flashattn.InvalidError, match="expected"):
        float8.quantize(q[0, 0], k[0, 0], k[0, 0])


def test_float8_under_compile():
    q = torch.randn(1, 5, 2, 16).to(F8)
    compiled = torch.compile(lambda q: interface3.flash_attn_func(q, q, q)[0] + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q), interface3.flash_attn_func(q, q, q)[0] + 1)
