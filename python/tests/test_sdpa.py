"""flashattn.sdpa is torch.nn.functional.scaled_dot_product_attention, wherever that has an answer."""

import attention_math as math_
import flashattn
import pytest
import torch
from flashattn.sdpa import sdpa, use_for_sdpa

THEIRS = torch.nn.functional.scaled_dot_product_attention


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=math_.seeded(seed)).to(dtype).requires_grad_()


def same(q, k, v, mask=None, tolerance=1e-5, **options):
    """Outputs and gradients of both, the mask's too."""
    leaves = [q, k, v] + ([mask] if mask is not None and mask.requires_grad else [])
    ours, theirs = sdpa(q, k, v, attn_mask=mask, **options), THEIRS(q, k, v, attn_mask=mask, **options)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert torch.allclose(ours, theirs, atol=tolerance)
    dout = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, leaves, dout), torch.autograd.grad(theirs, leaves, dout)):
        assert torch.allclose(a, b, atol=10 * tolerance)
    with torch.no_grad():  # the short way
        assert torch.allclose(sdpa(q, k, v, attn_mask=mask, **options), theirs, atol=tolerance)


@pytest.mark.parametrize("lengths", [(13, 13), (13, 30), (30, 13), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_is_aligned_top_left(lengths, is_causal):
    rows, keys = lengths
    same(make(2, 3, rows, 16), make(2, 3, keys, 16, seed=1), make(2, 3, keys, 20, seed=2), is_causal=is_causal)


@pytest.mark.parametrize("shape", [(11, 17), (1, 17), (11, 1), (1, 1, 11, 17), (2, 1, 1, 17), (2, 3, 11, 17), (1, 3, 11, 17),
                                   (3, 11, 17), (2, 1, 11, 17)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float_grad"])
def test_masks_of_every_shape(shape, kind):
    q, k, v = make(2, 3, 11, 16), make(2, 3, 17, 16, seed=1), make(2, 3, 17, 16, seed=2)
    mask = make(*shape, seed=3)
    mask = mask.detach() > -1.2 if kind == "bool" else mask if kind == "float_grad" else mask.detach()
    if kind == "bool":
        mask = mask.expand(*mask.shape[:-1], 17).clone() if shape[-1] == 17 else torch.ones_like(mask)
        mask[..., 0] = True  # every row sees something: PyTorch's gradient of one that does not is NaN
    same(q, k, v, mask)


def test_a_row_that_sees_nothing_is_zero_not_nan():
    q, k, v = make(1, 1, 3, 8), make(1, 1, 4, 8, seed=1), make(1, 1, 4, 8, seed=2)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    out = sdpa(q, k, v, attn_mask=mask)
    assert (out[0, 0, 1] == 0).all()
    dq, = torch.autograd.grad(out.sum(), q)
    assert (dq[0, 0, 1] == 0).all() and torch.isfinite(dq).all()


@pytest.mark.parametrize("dims", [2, 3, 5, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_other_numbers_of_dimensions(dims, masked):
    lead = {2: (), 3: (4,), 5: (2, 3, 4), 6: (2, 1, 3, 4)}[dims]
    q, k, v = make(*lead, 7, 8), make(*lead, 9, 8, seed=1), make(*lead, 9, 8, seed=2)
    same(q, k, v, make(*lead, 7, 9, seed=3) if masked else None)
    if masked and dims == 5:
        same(q, k, v, make(3, 1, 7, 9, seed=3))
        same(q, k, v, make(2, 1, 1, 7, 9, seed=3))


def test_a_batch_that_broadcasts():
    q, k, v = make(4, 2, 7, 8), make(1, 2, 9, 8, seed=1), make(1, 2, 9, 8, seed=2)
    same(q, k, v)
    same(make(2, 3, 2, 7, 8), make(1, 3, 2, 9, 8, seed=1), make(2, 1, 2, 9, 8, seed=2))


def test_gqa_and_scale():
    q, k, v = make(2, 6, 7, 8), make(2, 2, 9, 8, seed=1), make(2, 2, 9, 8, seed=2)
    same(q, k, v, enable_gqa=True, scale=0.17)
    with pytest.raises(RuntimeError, match="enable_gqa"):
        sdpa(q, k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["heads first", "rows first", "no head_dim last", "broadcast", "wide values"])
def test_the_short_way_gives_the_same_bits_and_strides(layout, causal):
    """Without a gradient nothing is transposed on the way."""
    q, k, v = (make(2, 3, 11, 16, seed=n) for n in range(3))
    if layout == "rows first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "no head_dim last":
        q, k = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k))
    elif layout == "broadcast":
        k, v = k[:, :1].expand(2, 3, 11, 16), v[:1, :1, :1, :1].expand(2, 3, 11, 16)
    elif layout == "wide values":
        v = make(2, 3, 11, 40)
    expected = sdpa(q, k, v, is_causal=causal)
    with torch.no_grad():
        out = sdpa(q, k, v, is_causal=causal)
    assert expected.requires_grad and torch.equal(out, expected) and out.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    q, k, v = (make(2, 3, 33, 32, dtype=dtype, seed=n) for n in range(3))
    same(q, k, v, make(33, 33, dtype=dtype).detach(), tolerance=2e-2)
    same(q, k, v, torch.ones(33, 33, dtype=torch.bool).tril(), tolerance=2e-2)


def test_dropout_drops_its_share():
    v = torch.eye(128).expand(1, 2, 128, 128)
    zeros = torch.zeros(1, 2, 128, 128)
    torch.manual_seed(0)
    out = sdpa(zeros, zeros, v, dropout_p=0.25)
    assert abs((out != 0).float().mean().item() - 0.75) < 0.01
    assert torch.allclose(out[out != 0], torch.tensor(1 / 128 / 0.75), rtol=1e-4)


def test_refusals():
    q = make(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="exclude each other"):
        sdpa(q, q, q, attn_mask=torch.ones(4, 4), is_causal=True)
    with pytest.raises(flashattn.InvalidError, match="attn_mask has dtype"):
        sdpa(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.int32))
    with pytest.raises(flashattn.InvalidError, match="dimensions"):
        sdpa(q[0, 0, 0], q, q)
    with pytest.raises(flashattn.InvalidError, match="bias.shape"):
        sdpa(q, q, q, attn_mask=torch.ones(5, 4))
    with pytest.raises(flashattn.InvalidError, match="attn_mask has 3 columns: expected 1, or 4"):
        sdpa(q, q, q, attn_mask=torch.ones(4, 3))


def test_the_context_manager_routes_and_gives_back():
    q, k, v = (t.detach() for t in (make(1, 2, 9, 8), make(1, 2, 9, 8, seed=1), make(1, 2, 9, 8, seed=2)))
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = make(2, 5, 16)
    expected = layer(x, x, x, need_weights=False)[0]
    with use_for_sdpa():
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
        with use_for_sdpa():
            assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v), sdpa(q, k, v))
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
        with pytest.raises(RuntimeError):
            torch.nn.functional.scaled_dot_product_attention(q, k[..., :4], v)
        assert torch.allclose(layer(x, x, x, need_weights=False)[0], expected, atol=1e-5)
    assert torch.nn.functional.scaled_dot_product_attention is THEIRS
    try:
        with use_for_sdpa():
            raise KeyError
    except KeyError:
        assert torch.nn.functional.scaled_dot_product_attention is THEIRS


@pytest.mark.parametrize("device", ["cpu"])
def test_autocast_is_heeded(device):
    """As PyTorch's own, which is on autocast's list: float32 inputs are rounded, and the answer is of autocast's dtype."""
    with torch.device(device):
        q, k, v = (make(1, 2, 9, 16, seed=n) for n in range(3))
        mask = make(9, 9, seed=3).detach()
        with torch.autocast(device, dtype=torch.bfloat16):
            for given in (None, mask, mask > 0.5):
                ours, theirs = sdpa(q, k.bfloat16(), v, attn_mask=given), THEIRS(q, k.bfloat16(), v, attn_mask=given)
                assert ours.dtype == theirs.dtype == torch.bfloat16
                seen = torch.ones(9, dtype=torch.bool) if given is None or given.dtype != torch.bool else given.any(-1)
                assert torch.allclose(ours[..., seen, :].float(), theirs[..., seen, :].float(), atol=2e-2)
        assert torch.autograd.grad(ours.float().sum(), q)[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["causal_lower_right", "causal_upper_left"])
def test_masks_that_pytorch_has_as_classes(name):
    """Their own numbers mean nothing."""
    mask = getattr(pytest.importorskip("torch.nn.attention.bias"), name)(5, 9)
    q, k, v = make(2, 3, 5, 16), make(2, 3, 9, 16, seed=1), make(2, 3, 9, 16, seed=2)
    ours, theirs = sdpa(q, k, v, attn_mask=mask), THEIRS(q, k, v, attn_mask=mask)
    assert type(ours) is torch.Tensor and torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("rows, keys", [(0, 3), (3, 0)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_no_queries_or_no_keys_beside_a_mask(rows, keys, kind):
    out = sdpa(make(1, 2, rows, 8), make(1, 2, keys, 8), make(1, 2, keys, 8), attn_mask=torch.ones(rows, keys, dtype=kind))
    assert out.shape == (1, 2, rows, 8) and not out.any()


def test_vmap_over_a_boolean_mask():
    q, mask = make(3, 2, 2, 5, 8).detach(), torch.rand(3, 5, 5, generator=math_.seeded(1)) > 0.3
    mask |= torch.eye(5, dtype=torch.bool)
    ours = torch.vmap(lambda q, m: sdpa(q, q, q, attn_mask=m))(q, mask)
    assert torch.allclose(ours, torch.stack([THEIRS(a, a, a, attn_mask=m) for a, m in zip(q, mask)]), atol=1e-5)
