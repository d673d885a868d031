"""Arrays of lengths, pages and indices, and plain numbers: C is told addresses and 32 bits, so Python looks first."""

import flashattn
import pytest
import torch
from flashattn import interface3


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


PACKED, ENDS, USED = torch.ones(6, 2, 4), int32(0, 2, 6), int32(1, 1)
DENSE, PAGED, TABLE = torch.ones(2, 3, 2, 4), torch.ones(4, 3, 2, 4), int32(0, 1, 2, 3).view(2, 2)


@pytest.mark.parametrize("as_kind", [lambda array: array, lambda array: array.numpy()], ids=["torch", "numpy"])
@pytest.mark.parametrize("name, bad, sentence", [
    ("cu_seqlens_q", int32(), "is empty"), ("cu_seqlens_q", ENDS.view(1, 3), r"has shape \[1, 3\]: expected \[any\]"),
    ("cu_seqlens_q", ENDS.float(), "is float32: expected int32"), ("cu_seqlens_k", int32(0, 6), r"has shape \[2\]: expected \[3\]"),
    ("cu_seqlens_k", int32(0, 1, 2, 6), r"has shape \[4\]: expected \[3\]"),
    ("cu_seqlens_k", torch.tensor([0, 2**32 + 2, 6]), "has numbers that int32 does not hold"), ("seqused_q", int32(1), r"has shape \[1\]: expected \[2\]"),
    ("seqused_k", int32(1), r"has shape \[1\]: expected \[2\]"), ("cache_seqlens", int32(1), r"has shape \[1\]: expected \[2\]"),
    ("cache_seqlens", int32(1, 1, 1), r"has shape \[3\]"), ("cache_batch_idx", int32(0), r"has shape \[1\]"),
    ("cache_leftpad", int32(0), r"has shape \[1\]"), ("block_table", TABLE[:1], r"has shape \[1, 2\]: expected \[2, any\]"),
    ("block_table", TABLE[0], r"has shape \[2\]"), ("block_table", TABLE.float(), "is float32: expected int32")])
def test_arrays_of_numbers_have_one_for_each_sequence(name, bad, sentence, as_kind):
    """C is told an address, and would read past the end of a shorter array: a new key would go to a row that nobody named."""
    good = dict(cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, seqused_q=USED, seqused_k=USED, cache_seqlens=USED, cache_batch_idx=int32(1, 0),
                cache_leftpad=int32(0, 0), block_table=TABLE)
    cache = PAGED.clone() if name == "block_table" else DENSE.clone()
    varlen = name.startswith(("cu_", "seq"))

    def call(array):
        chosen = {name: as_kind(array), **({} if varlen or name == "cache_seqlens" else {"cache_seqlens": as_kind(USED)})}
        if varlen:
            ends = {end: as_kind(good[end]) for end in ("cu_seqlens_q", "cu_seqlens_k")}
            return interface3.flash_attn_varlen_func(*[as_kind(PACKED)] * 3, **{**ends, **chosen}, max_seqlen_q=4, max_seqlen_k=4)
        return flashattn.flash_attn_with_kvcache(as_kind(DENSE[:, :1]), as_kind(cache), as_kind(cache.clone()), as_kind(DENSE[:, 1:2]),
                                                 as_kind(DENSE[:, 1:2]), **chosen)

    call(good[name])
    before = cache.fill_(7).clone()
    with pytest.raises(flashattn.InvalidError, match=f"{name} {sentence}"):
        call(bad)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("as_kind", [lambda array: array, lambda array: array.numpy()], ids=["torch", "numpy"])
def test_a_part_of_a_wider_block_table_is_read_where_it_lies(as_kind):
    q, pages, new = torch.randn(2, 1, 2, 4), torch.randn(8, 3, 2, 4), torch.randn(2, 1, 2, 4)
    wide = int32(5, 1, 6, 7, 2, 3, 0, 4).view(2, 4)
    results = []
    for table in (wide[:, :2], wide[:, :2].contiguous(), wide.long()[:, :2], wide.flip(1)[:, 2:].flip(1)):
        cache = pages.clone(), pages.clone()
        out = flashattn.flash_attn_with_kvcache(*map(as_kind, (q, *cache, new, new)), cache_seqlens=as_kind(int32(4, 2)),
                                                block_table=as_kind(table))
        results.append((torch.as_tensor(out), *cache))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    assert torch.equal(results[0][1][1, 1], new[0, 0]) and torch.equal(results[0][1][2, 2], new[1, 0])


@pytest.mark.parametrize("options, named", [
    (dict(window_size=(2**40, 0)), "window"), (dict(window_size=(0.5, 0)), "window"), (dict(softmax_scale="x"), "scale 'x'"),
    (dict(window_size=(2**40, 0), alibi_slopes=torch.ones(2)), "window")])
def test_numbers_that_c_does_not_hold_are_refused_not_cut_off(options, named):
    with pytest.raises(flashattn.InvalidError, match=named):
        flashattn.flash_attn_func(DENSE, DENSE, DENSE, **options)
    with pytest.raises(flashattn.InvalidError, match="max_seqlen"):
        flashattn.flash_attn_varlen_func(PACKED, PACKED, PACKED, ENDS, ENDS, 2**40, 4)


def test_a_tensor_of_another_device_is_not_taken_for_a_gpu_s():
    with pytest.raises(flashattn.UnsupportedError, match="device meta is not supported"):
        flashattn.flash_attn_func(*[DENSE.to("meta")] * 3)
