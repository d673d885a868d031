"""Parity with PyTorch's own arithmetic over the grid of flash_attn's suite, forward and backward."""

import attention_math as math_
import flashattn
import pytest
import torch

HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
PAIRS = [(1, 147), (3, 799), (113, 203), (127, 513), (128, 217), (108, 256), (256, 512), (512, 256), (1023, 1024),
         (1024, 1023)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(batch, seqlen_q, seqlen_k, heads_q, heads_k, d, dtype, dv=None, seed=0):
    torch.manual_seed(seed)
    make = lambda *shape: torch.randn(*shape).to(dtype).requires_grad_()
    return make(batch, seqlen_q, heads_q, d), make(batch, seqlen_k, heads_k, d), make(batch, seqlen_k, heads_k, dv or d)


def check(q, k, v, out, sees, factor=3, **options):
    """Output and gradients against double, with plain attention in the inputs' dtype as the yardstick."""
    truth, _ = math_.attention(q, k, v, sees, **options)
    plain, _ = math_.attention(q, k, v, sees, upcast=False, **options)
    math_.assert_close(out, truth, plain, "out")
    dout = torch.randn_like(out)
    leaves = (q, k, v)
    ours = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    expected = torch.autograd.grad(truth, leaves, dout.double())
    yardstick = torch.autograd.grad(plain, leaves, dout)
    # Gradients of the truth come back in the leaves' dtype: add that rounding by the factor.
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, expected, yardstick):
        math_.assert_close(a, b.double(), c, name, factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "local"])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_head_dim(d, mask, dtype):
    seqlen_q, seqlen_k = 113, 203
    q, k, v = inputs(1, seqlen_q, seqlen_k, 4, 2, d, dtype)
    window = (57, 31) if mask == "local" else (-1, -1)
    out = flashattn.flash_attn_func(q, k, v, causal=mask == "causal", window_size=window)
    check(q, k, v, out, math_.visible(seqlen_q, seqlen_k, mask == "causal", window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "local"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_pair_of_lengths(pair, mask, dtype):
    q, k, v = inputs(1, *pair, 2, 1, 59, dtype)
    window = (pair[1] // 3, pair[1] // 5) if mask == "local" else (-1, -1)
    out = flashattn.flash_attn_func(q, k, v, causal=mask == "causal", window_size=window)
    check(q, k, v, out, math_.visible(*pair, mask == "causal", window))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_head_dim_at_every_pair_of_lengths(d, pair, dtype):
    for mask in ("none", "causal", "local"):
        q, k, v = inputs(1, *pair, 2, 1, d, dtype)
        window = (pair[1] // 3, pair[1] // 5) if mask == "local" else (-1, -1)
        out = flashattn.flash_attn_func(q, k, v, causal=mask == "causal", window_size=window)
        check(q, k, v, out, math_.visible(*pair, mask == "causal", window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "local"])
def test_dropout_is_the_formula_with_the_pairs_that_it_drops(mask, dtype):
    """Values that are unit vectors show which pairs are dropped; the same seed drops them with other values and gradients."""
    p, pair, window = 0.17, (113, 203), (57, 31) if mask == "local" else (-1, -1)
    q, k, v = inputs(2, *pair, 4, 2, 64, dtype)
    run = lambda q, k, v: flashattn.flash_attn_func(q, k, v, dropout_p=p, causal=mask == "causal", window_size=window)
    torch.manual_seed(9)
    out = run(q, k, v)
    torch.manual_seed(9)
    unit = torch.eye(pair[1]).view(1, pair[1], 1, pair[1]).expand(2, pair[1], 2, pair[1]).float()
    keep = (run(torch.zeros(q.shape), torch.zeros(k.shape), unit) != 0).permute(0, 2, 1, 3)  # [b, heads, rows, keys]
    sees = math_.visible(*pair, mask == "causal", window)
    seen = keep[sees.expand_as(keep)]
    assert abs(seen.double().mean().item() - (1 - p)) < 0.01
    check(q, k, v, out, sees, keep=keep, dropout_p=p)


def test_sixteen_queries_on_a_hundred_thousand_keys():
    q, k, v = inputs(1, 16, 100_000, 2, 2, 64, torch.bfloat16)
    check(q, k, v, flashattn.flash_attn_func(q, k, v, causal=True), math_.visible(16, 100_000, True))


@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 2), (6, 1)], ids=["mha", "gqa2", "gqa3", "mqa"])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("alibi", [None, "heads", "batch"])
def test_gqa_softcap_alibi(heads, softcap, alibi):
    q, k, v = inputs(2, 65, 129, *heads, 48, torch.bfloat16)
    slopes = bias = None
    if alibi:
        slopes = torch.rand(heads[0]) * 0.3 if alibi == "heads" else torch.rand(2, heads[0]) * 0.3
        bias = math_.alibi_bias(slopes, 65, 129)
    out = flashattn.flash_attn_func(q, k, v, causal=True, softcap=softcap, alibi_slopes=slopes)
    check(q, k, v, out, math_.visible(65, 129, True), softcap=softcap, bias=bias)


@pytest.mark.parametrize("lengths", [[(128, 128), (1, 77), (200, 13)], [(0, 5), (17, 0), (33, 40)], [(0, 0), (0, 0)]],
                         ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_is_each_sequence_alone(lengths, causal):
    heads, d, dtype = 3, 64, torch.bfloat16
    cu_q = torch.tensor([0] + [a for a, _ in lengths]).cumsum(0).int()
    cu_k = torch.tensor([0] + [b for _, b in lengths]).cumsum(0).int()
    torch.manual_seed(1)
    q = torch.randn(int(cu_q[-1]), heads, d).to(dtype).requires_grad_()
    k, v = (torch.randn(int(cu_k[-1]), heads, d).to(dtype).requires_grad_() for _ in range(2))
    out, lse, _ = flashattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(a for a, _ in lengths),
                                                   max(b for _, b in lengths), causal=causal, return_attn_probs=True)
    assert lse.shape == (heads, q.shape[0])
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for b, (a, c) in enumerate(lengths):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = [t[s].detach().unsqueeze(0).requires_grad_() for t, s in ((q, rows), (k, keys), (v, keys))]
        single = flashattn.flash_attn_func(*alone, causal=causal)
        math_.assert_same(single[0], out[rows], "out", roundings=3)
        # Bit for bit beside zeros that are as many as the longest lengths, for by them a GPU's kernel is chosen.
        most = [max(n) for n in zip(*lengths)]
        ends = [torch.tensor([0, n, n + m], dtype=torch.int32) for n, m in zip((a, c), most)]
        filled = [torch.cat([t[0], t.new_zeros(m, heads, d)]) for t, m in zip(alone, (most[0], most[1], most[1]))]
        same = flashattn.flash_attn_varlen_func(*filled, *ends, *most, causal=causal)[:a]
        assert torch.equal(same, out[rows])
        for own, whole, s in zip(torch.autograd.grad(same, alone, dout[rows]), grads, (rows, keys, keys)):
            math_.assert_same(own[0], whole[s])
        for own, whole, s in zip(torch.autograd.grad(single, alone, dout[rows].unsqueeze(0)), grads, (rows, keys, keys)):
            math_.assert_same(own[0], whole[s], roundings=4)


def test_packed_forms_are_the_plain_one():
    torch.manual_seed(2)
    qkv = torch.randn(2, 50, 3, 4, 32).bfloat16().requires_grad_()
    q, k, v = (qkv[:, :, n].detach().clone().requires_grad_() for n in range(3))
    dout = torch.randn(2, 50, 4, 32).bfloat16()
    plain = flashattn.flash_attn_func(q, k, v, causal=True)
    grads = torch.autograd.grad(plain, (q, k, v), dout)
    packed = flashattn.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(packed, plain)
    math_.assert_same(torch.autograd.grad(packed, qkv, dout)[0], torch.stack(grads, 2))
    assert torch.equal(flashattn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True), plain)
    cu = torch.tensor([0, 50, 100], dtype=torch.int32)
    flat = flashattn.flash_attn_varlen_qkvpacked_func(qkv.detach().flatten(0, 1), cu, 50, causal=True)
    assert torch.equal(flat, plain.flatten(0, 1))
    flat = flashattn.flash_attn_varlen_kvpacked_func(q.detach().flatten(0, 1), qkv.detach().flatten(0, 1)[:, 1:], cu, cu, 50,
                                                     50, causal=True)
    assert torch.equal(flat, plain.flatten(0, 1))


def test_gradients_of_views_that_are_not_contiguous():
    torch.manual_seed(3)
    base = torch.randn(4, 2, 70, 64).bfloat16()  # [heads, batch, rows, d]
    q, k, v = (base.clone().permute(1, 2, 0, 3).requires_grad_() for _ in range(3))
    out = flashattn.flash_attn_func(q, k, v)
    dout = torch.randn(64, 70, 4, 2).bfloat16().permute(3, 1, 2, 0)  # inner stride is not 1
    ours = torch.autograd.grad(out, (q, k, v), dout)
    flat = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(flashattn.flash_attn_func(*flat), flat, dout.contiguous())
    for a, b in zip(ours, expected):
        math_.assert_same(a, b)
    # A gradient that is broadcast: of out.sum()
    summed = torch.autograd.grad(flashattn.flash_attn_func(*flat).sum(), flat)
    ones = torch.autograd.grad(flashattn.flash_attn_func(*flat), flat, torch.ones_like(out))
    for a, b in zip(summed, ones):
        math_.assert_same(a, b)


def test_dropout_drops_p_and_both_passes_agree():
    torch.manual_seed(4)
    q = torch.zeros(1, 256, 2, 256)  # equal probabilities
    k = torch.zeros(1, 256, 2, 256)
    v = torch.eye(256).view(1, 256, 1, 256).expand(1, 256, 2, 256).contiguous().requires_grad_()
    torch.manual_seed(5)
    out = flashattn.flash_attn_func(q, k, v, dropout_p=0.3)  # out = P Z / (1 - p): shows the mask itself
    kept = out.detach() != 0
    assert abs(kept.double().mean().item() - 0.7) < 0.01
    assert torch.allclose(out[kept], torch.tensor(1 / 256 / 0.7), rtol=1e-4)
    dout = torch.randn_like(out)
    dv, = torch.autograd.grad(out, v, dout)
    assert torch.allclose(dv, torch.einsum("bihj,bihd->bjhd", out.detach(), dout), atol=1e-5)
    torch.manual_seed(5)
    assert torch.equal(flashattn.flash_attn_func(q, k, v.detach(), dropout_p=0.3), out.detach())  # the short way too
    assert not torch.equal(flashattn.flash_attn_func(q, k, v.detach(), dropout_p=0.3), out.detach())
