"""Block masks: each shows what its definition says, and attention with it is plain attention of these pairs."""

import attention_math as math_
import flashattn
import numpy as np
import pytest
import torch
from flashattn import flash_attn_masked_func, masks


def make(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=math_.seeded(seed)).to(dtype)


def shown(seqlen_q, seqlen_k, sees):
    return np.array([[[sees(i, j) for j in range(seqlen_k)] for i in range(seqlen_q)]])


# ---- what masks show ----


def document(ends, i):
    return next((n for n, end in enumerate(ends) if i < end), None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[10, 7, 13], [30], [0, 12, 0, 18], [4, 5], [1] * 9], ids=str)
def test_documents_see_themselves(lengths, causal):
    ends = np.cumsum(lengths).tolist()
    expected = shown(30, 30, lambda i, j: document(ends, i) is not None and document(ends, i) == document(ends, j) and (j <= i or not causal))
    assert np.array_equal(masks.documents(lengths, causal).dense(30, 30), expected)
    ids = [-1 if document(ends, i) is None else document(ends, i) for i in range(30)]
    for kind in (list, np.array, torch.tensor):
        assert np.array_equal(masks.documents_of(kind(ids), causal).dense(30, 30), expected)


def test_each_sequence_has_its_own_documents():
    both = masks.documents([[10, 20], [5, 5, 5]])
    assert both.own and np.array_equal(both.dense(30, 30), np.concatenate([masks.documents(n).dense(30, 30) for n in ([10, 20], [5, 5, 5])]))
    ids = torch.tensor([[0] * 10 + [1] * 20, [3] * 5 + [0] * 5 + [3] * 5 + [-1] * 15])
    assert np.array_equal(masks.documents_of(ids).dense(30, 30), both.dense(30, 30))


@pytest.mark.parametrize("length", [0, 1, 9, 20])
def test_all_queries_see_a_prefix(length):
    assert np.array_equal(masks.prefix(length, 20).dense(20, 20), shown(20, 20, lambda i, j: j < length or j <= i))


def test_answers_see_the_question_and_themselves():
    ends = [6, 10, 11, 19]
    expected = shown(19, 19, lambda i, j: j <= i and (j < 6 or document(ends, i) == document(ends, j)))
    assert np.array_equal(masks.shared_question(6, [4, 1, 8]).dense(19, 19), expected)


@pytest.mark.parametrize("count, window, seqlen", [(2, 5, 20), (0, 1, 9), (4, 4, 12), (3, 30, 20), (1, 20, 20)])
def test_first_keys_stay_before_a_window(count, window, seqlen):
    assert np.array_equal(masks.sinks(count, window, seqlen).dense(seqlen, seqlen), shown(seqlen, seqlen, lambda i, j: j <= i and (j < count or i - j < window)))


def test_blocks_are_those_of_the_table():
    table = np.random.default_rng(0).random((4, 5)) < 0.5
    for kind in (np.array, torch.tensor, np.ndarray.tolist):
        mask = masks.blocks(kind(table), 8, 30, 37)
        assert np.array_equal(mask.dense(30, 37), shown(30, 37, lambda i, j: table[i // 8, j // 8]))
    assert len(masks.blocks(np.ones((2, 2), bool), 8, 16, 16).lists[0]) == 2


def test_either_of_two_masks():
    a, b = masks.documents([10, 10]), masks.from_slices(np.array([[0, 20, 0, 3, masks.FULL]]))
    assert np.array_equal((a | b).dense(20, 20), a.dense(20, 20) | b.dense(20, 20))
    own = masks.per_sequence([a, masks.prefix(5, 20)])
    assert np.array_equal((own | b).dense(20, 20), own.dense(20, 20) | b.dense(20, 20)) and (b | own).own
    assert repr(own | b) == "BlockMask(6 slices of 2 sequences)" and repr(a) == "BlockMask(2 slices)"


# ---- attention ----

MASKS = {
    "documents": masks.documents([20, 13, 27]),
    "own documents": masks.documents([[60], [11, 40]]),
    "full documents": masks.documents([31, 29], causal=False),
    "prefix": masks.prefix(17, 60),
    "shared question": masks.shared_question(20, [10, 30]),
    "sinks": masks.sinks(4, 13, 60),
    "blocks": masks.blocks(np.random.default_rng(1).random((4, 4)) < 0.6, 16, 60, 60),
    "nothing": masks.from_slices([]),
    "own, one nothing": masks.per_sequence([masks.from_slices([]), masks.prefix(3, 60)]),
}


def check(mask, seqlen, options, head_dim=16, dtype=torch.float32):
    leaves = [make(2, seqlen, heads, head_dim, seed=n, dtype=dtype).requires_grad_() for n, heads in enumerate((4, 2, 2))]
    dout = make(2, seqlen, 4, head_dim, seed=3, dtype=dtype)
    allowed = math_.visible(seqlen, seqlen, options.get("causal", False), options.get("window_size", (-1, -1)))
    sees = torch.as_tensor(mask.dense(seqlen, seqlen), device=dout.device).unsqueeze(1) & allowed
    truth, truth_lse = math_.attention(*leaves, sees, softcap=options.get("softcap", 0.0))
    plain, _ = math_.attention(*leaves, sees, softcap=options.get("softcap", 0.0), upcast=False)
    out, lse, rest = flash_attn_masked_func(*leaves, mask, return_attn_probs=True, **options)
    math_.assert_close(out.detach(), truth.detach(), plain.detach(), "out")
    assert rest is None and torch.allclose(lse.double(), truth_lse.detach(), atol=1e-5 if dtype == torch.float32 else 1e-2)
    all_wanted = zip(torch.autograd.grad(truth, leaves, dout.double()), torch.autograd.grad(plain, leaves, dout))
    for ours, (expected, rough) in zip(torch.autograd.grad(out, leaves, dout), all_wanted):
        math_.assert_close(ours, expected, rough, "gradient", 3)
    if out.is_cpu and dtype == torch.float32:
        numpy = flash_attn_masked_func(*(t.detach().numpy() for t in leaves), mask, **options)
        assert np.array_equal(numpy, out.detach())


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(9, 4), softcap=5.0)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_of_the_pairs_that_are_shown(name, options):
    check(MASKS[name], 60, options)


def test_documents_are_packed_sequences():
    q, k, v = (make(1, 60, 2, 16, seed=n, dtype=torch.bfloat16) for n in range(3))
    ends = torch.tensor([0, 20, 33, 60], dtype=torch.int32)
    packed = flashattn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 27, 27, causal=True)
    out = flash_attn_masked_func(q, k, v, MASKS["documents"])
    math_.assert_close(out[0], packed.double(), packed, "out")


def test_compiled_and_dropped():
    q, k, v = (make(2, 60, 2, 16, seed=n) for n in range(3))
    run = lambda *a: flash_attn_masked_func(*a, MASKS["own documents"])  # noqa: E731
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v), run(q, k, v))
    torch.manual_seed(5)
    first = flash_attn_masked_func(q, k, v, MASKS["prefix"], dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, flash_attn_masked_func(q, k, v, MASKS["prefix"], dropout_p=0.5)) and not torch.equal(first, flash_attn_masked_func(q, k, v, MASKS["prefix"]))
    assert flash_attn_masked_func(*(t.numpy(force=True) for t in (q, k, v)), MASKS["prefix"], dropout_p=0.5).shape == tuple(q.shape)


# ---- what is refused ----


@pytest.mark.parametrize("make_mask, words", [
    (lambda: masks.documents([3, -1]), "a length is -1"), (lambda: masks.prefix(21, 20), "length is 21: expected 0 to 20"),
    (lambda: masks.sinks(6, 5, 20), "count is 6"), (lambda: masks.blocks([[True]], 8, 20, 8), r"expected \(3, 1\)"),
    (lambda: masks.from_slices([(0, 1, 2)]), "a slice is"), (lambda: masks.documents_of(np.zeros((1, 1, 1))), "3 dimensions"),
    (lambda: masks.per_sequence([MASKS["own documents"]]), "several sequences already"), (lambda: masks.BlockMask([[], []]), "2 lists"),
    (lambda: MASKS["own documents"] | masks.documents([[1], [2], [3]]), "2 and 3 sequences"),
])
def test_a_mask_that_cannot_be(make_mask, words):
    with pytest.raises(flashattn.InvalidError, match=words):
        make_mask()


@pytest.mark.parametrize("mask, words", [
    (None, "mask is NoneType"), (masks.documents([[1], [2], [3]]), "of 3 sequences but q has 2"), (masks.documents([61]), "slices.list"),
    (masks.from_slices([(0, 1, 0, 1, 7)]), "kind is 7"),
])
def test_a_mask_that_does_not_fit(mask, words):
    q = make(2, 60, 2, 16)
    with pytest.raises(flashattn.InvalidError, match=words):
        flash_attn_masked_func(q, q, q, mask)


def test_either_of_a_mask_and_something_else():
    with pytest.raises(TypeError):
        MASKS["prefix"] | 3
