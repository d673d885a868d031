"""Every kind of array and every stride gives what a plain contiguous array gives; what is no array is refused."""

import flashattn
import ml_dtypes
import numpy as np
import pytest
import torch

rng = np.random.default_rng(0)


def formula(q, k, v):
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", scores / scores.sum(-1, keepdims=True), v)


def three(*shape, dtype=np.float32):
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


class OnlyDLPack:
    def __init__(self, owner):
        self.owner = owner

    def __dlpack__(self, **options):
        return self.owner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()


class OnlyInterface:
    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)])
def test_numpy_of_every_dtype(dtype, tolerance):
    q, k, v = three(2, 9, 3, 20, dtype=dtype)
    out, lse, _ = flashattn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert isinstance(out, np.ndarray) and out.dtype == dtype and lse.dtype == np.float32 and lse.shape == (2, 3, 9)
    assert np.abs(out.astype(np.float64) - formula(q, k, v)).max() < tolerance


@pytest.mark.parametrize("change", [
    lambda t: t[::-1], lambda t: t[:, ::-1], lambda t: t[:, :, ::-1], lambda t: t[..., ::-1], lambda t: t[:, ::2],
    lambda t: t[..., 1::3], lambda t: t.transpose(1, 0, 2, 3), lambda t: t.transpose(3, 2, 1, 0),
    lambda t: np.broadcast_to(t[:1], t.shape), lambda t: np.broadcast_to(t[..., :1], t.shape),
    lambda t: np.broadcast_to(t[:, :1, :, :], t.shape), lambda t: np.broadcast_to(t[0, 0, 0, 0], t.shape)])
def test_any_strides(change):
    q, k, v = (change(t) for t in three(2, 12, 3, 18))
    out = flashattn.flash_attn_func(q, k, v)
    flat = flashattn.flash_attn_func(*(np.ascontiguousarray(t) for t in (q, k, v)))
    assert np.array_equal(out, flat)
    assert np.abs(out - formula(q, k, v)).max() < 1e-5


def test_a_view_off_by_one_element():
    base = rng.standard_normal(2 * 5 * 2 * 8 + 1).astype(np.float32)[1:].reshape(2, 5, 2, 8)
    assert np.array_equal(flashattn.flash_attn_func(base, base, base), flashattn.flash_attn_func(*[base.copy()] * 3))


def test_read_only_inputs_are_read():
    q, k, v = three(1, 4, 1, 8)
    expected = flashattn.flash_attn_func(q, k, v)
    for t in (q, k, v):
        t.flags.writeable = False
    assert np.array_equal(flashattn.flash_attn_func(q, k, v), expected)


def test_read_only_results_are_refused(tmp_path):
    """As of a file that is mapped for reading, where a write would end the process."""
    np.zeros((1, 8, 1, 4), np.float32).tofile(tmp_path / "cache")
    cache = np.memmap(tmp_path / "cache", np.float32, "r", shape=(1, 8, 1, 4))
    new = np.ones((1, 1, 1, 4), np.float32)
    for k, v, name in ((cache, cache.copy(), "k_cache"), (cache.copy(), cache, "v_cache")):
        with pytest.raises(flashattn.InvalidError, match=f"{name} is read-only"):
            flashattn.flash_attn_with_kvcache(new, k, v, new, new, cache_seqlens=0)
    assert flashattn.flash_attn_with_kvcache(new, cache, cache, cache_seqlens=4).shape == new.shape  # it is read alone


def test_lengths_are_numbers():
    q, lengths = np.ones((3, 1, 4), np.float32), np.array([False, True])
    with pytest.raises(flashattn.InvalidError, match="cu_seqlens_q is bool"):
        flashattn.flash_attn_varlen_func(q, q, q, lengths, lengths, 1, 1)


@pytest.mark.parametrize("wrap", [lambda t: OnlyDLPack(t), lambda t: OnlyDLPack(torch.from_numpy(t)),
                                  lambda t: OnlyDLPack(torch.from_numpy(t).transpose(1, 2).contiguous().transpose(1, 2)),
                                  lambda t: OnlyInterface(t), lambda t: OnlyInterface(t[:, :, ::-1][:, :, ::-1])])
def test_dlpack_and_array_interface(wrap):
    arrays = three(2, 7, 3, 16)
    expected = flashattn.flash_attn_func(*arrays)
    assert np.array_equal(flashattn.flash_attn_func(*(wrap(t) for t in arrays)), expected)


def test_dlpack_of_bfloat16():
    q, k, v = (torch.randn(1, 6, 2, 8).bfloat16() for _ in range(3))
    out = flashattn.flash_attn_func(*(OnlyDLPack(t) for t in (q, k, v)))
    assert out.dtype == ml_dtypes.bfloat16
    assert np.array_equal(out.astype(np.float32), flashattn.flash_attn_func(q, k, v).float().numpy())


def test_numpy_and_torch_give_the_same_bits():
    q, k, v = three(2, 30, 4, 24)
    options = dict(causal=True, window_size=(5, 0), softcap=3.0, softmax_scale=0.3)
    ours = flashattn.flash_attn_func(q, k, v, **options)
    theirs = flashattn.flash_attn_func(*(torch.from_numpy(t) for t in (q, k, v)), **options)
    assert np.array_equal(ours, theirs.numpy())
    np.random.seed(3)
    once = flashattn.flash_attn_func(q, k, v, dropout_p=0.5)
    np.random.seed(3)
    assert np.array_equal(flashattn.flash_attn_func(q, k, v, dropout_p=0.5), once)
    assert not np.array_equal(flashattn.flash_attn_func(q, k, v, dropout_p=0.5), once)


@pytest.mark.parametrize("scale", [0.0, -0.5, None])
def test_the_scale_is_the_one_given(scale):
    q, k, v = three(1, 5, 1, 8)
    out = flashattn.flash_attn_func(q, k, v, softmax_scale=scale)
    longer = flashattn.flash_attn_func(*(t.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for t in (q, k, v)),
                                       softmax_scale=scale)
    assert np.array_equal(out, longer)
    scaled = q * (np.sqrt(8) * scale if scale is not None else 1)
    assert np.abs(out - formula(scaled, k, v)).max() < 1e-5


GOOD = np.ones((1, 2, 1, 4), np.float32)


@pytest.mark.parametrize("bad, sentence", [
    ([[1.0]], "list is not an array"), (None, "NoneType is not an array"), ("text", "str is not an array"),
    (GOOD.astype(np.float64), "float64 is not supported"), (GOOD.astype(np.int32), "boolean or integer"),
    (GOOD.astype(bool), "boolean or integer"), (GOOD.astype(">f4"), "native float32"),
    (GOOD.astype(np.complex64), "complex64 is not supported"), (GOOD[0], "3 dimensions"), (GOOD[None], "5 dimensions"),
    (np.ndarray((1, 2, 1, 4), np.float32, bytes(64), strides=(0, 8, 4, 5)), "multiples of the element size"),
    (torch.ones(1, 2, 1, 4, dtype=torch.float64), "float64"), (OnlyDLPack(np.ones((1, 2, 1, 4))), "DLPack dtype")])
def test_what_is_no_array_is_refused_with_a_sentence(bad, sentence):
    with pytest.raises(flashattn.InvalidError, match=sentence):
        flashattn.flash_attn_func(bad, bad, bad)


def test_arrays_of_two_kinds_are_refused_or_read():
    q = torch.ones(1, 2, 1, 4)
    with pytest.raises(flashattn.InvalidError, match="arrays of one kind"):
        flashattn.flash_attn_func(q, GOOD, GOOD)
    with pytest.raises(flashattn.InvalidError, match="dtype|float16"):
        flashattn.flash_attn_func(GOOD, GOOD.astype(np.float16), GOOD)


def test_the_owner_of_a_dlpack_array_may_go_away():
    def made():
        return OnlyDLPack(torch.randn(1, 50, 2, 32))

    for _ in range(20):
        assert np.isfinite(flashattn.flash_attn_func(made(), made(), made())).all()
