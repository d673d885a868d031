"""PyTorch's machinery sees through: opcheck, compile, export, checkpointing, DDP, threads, fork; what cannot work raises."""

import os
import subprocess
import sys
import threading

import attention_math as math_
import flashattn
import pytest
import torch
from flashattn import torch_ops
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


def qkv(*shape, dtype=torch.float32, grad=True, heads_k=None, seed=0):
    generator = math_.seeded(seed)
    other = shape if heads_k is None else (*shape[:2], heads_k, shape[3])
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in (shape, other, other)]


def plain_options(**changes):
    """The arguments of flashattn::forward after q, k and v."""
    options = dict(bias=None, alibi_slopes=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
                   seqused_k=None, slices=None, slice_offsets=None, rng_state=None, max_seqlen_q=0, max_seqlen_k=0, scale=0.3,
                   causal=True, window_left=-1, window_right=-1, softcap=0.0, dropout_p=0.0, deterministic=False)
    assert set(changes) <= set(options)
    return tuple({**options, **changes}.values())


def lengths():
    return torch.tensor([0, 3, 3, 12], dtype=torch.int32)


CASES = {
    "causal": lambda: (qkv(2, 9, 4, 16, heads_k=2), plain_options()),
    "bias_and_sinks": lambda: (qkv(2, 9, 4, 16), plain_options(bias=torch.randn(1, 4, 9, 9).requires_grad_(),
                                                              sinks=torch.randn(4).requires_grad_())),
    "bfloat16_window_softcap": lambda: (qkv(1, 9, 2, 16, dtype=torch.bfloat16), plain_options(window_left=3, softcap=2.0)),
    "dropout": lambda: (qkv(2, 9, 2, 16), plain_options(dropout_p=0.3, rng_state=torch.tensor([5, 0], device="cpu"))),
    "varlen": lambda: ([t.detach()[0].requires_grad_() for t in qkv(1, 12, 2, 8)],
                       plain_options(cu_seqlens_q=lengths(), cu_seqlens_k=lengths(), max_seqlen_q=9, max_seqlen_k=9)),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck_forward(case):
    inputs, options = CASES[case]()
    torch.library.opcheck(torch.ops.flashattn.forward.default, (*inputs, *options), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", CASES)
def test_opcheck_backward(case):
    inputs, options = CASES[case]()
    out, lse = torch.ops.flashattn.forward(*inputs, *options)
    want = [t is not None for t in (options[0], options[2])]
    arguments = [t.detach() if isinstance(t, torch.Tensor) else t
                 for t in (torch.randn_like(out), *inputs, out, lse, *options, *want)]
    torch.library.opcheck(torch.ops.flashattn.backward.default, tuple(arguments))


def test_gradients_are_the_derivative():
    inputs = [t.detach().double() for t in qkv(1, 5, 2, 4, heads_k=1)]
    bias, sinks = torch.randn(1, 2, 1, 5).double(), torch.randn(2).double()

    def run(q, k, v, bias, sinks):  # float32 inside; a step of 1e-2 keeps its rounding small beside the difference
        return torch_ops.attention(*(t.float() for t in (q, k, v)), bias=bias.float(), sinks=sinks.float(), causal=True,
                                   softcap=3.0)[0].double()

    leaves = [t.requires_grad_() for t in (*inputs, bias, sinks)]
    assert torch.autograd.gradcheck(run, leaves, eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0)


def model(q, k, v):
    return torch.nn.functional.silu(flashattn.flash_attn_func(q * 1.5, k, v, causal=True)).sum(-1)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_without_graph_breaks(backend):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for grad in (True, False):
        inputs = qkv(2, 17, 4, 16, heads_k=2, grad=grad)
        eager, ours = model(*inputs), compiled(*inputs)
        assert torch.allclose(eager, ours, atol=1e-5)
        if grad:
            ones = torch.ones_like(eager)
            for a, b in zip(torch.autograd.grad(eager, inputs, ones), torch.autograd.grad(ours, inputs, ones)):
                assert torch.allclose(a, b, atol=1e-5)


def test_compile_with_shapes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 17, 33):
        inputs = qkv(1, length, 2, 16)
        assert torch.allclose(compiled(*inputs), model(*inputs), atol=1e-5)


def test_compile_of_varlen_and_sdpa():
    torch._dynamo.reset()
    from flashattn.sdpa import sdpa

    q, k, v = CASES["varlen"]()[0]
    cu = lengths()
    varlen = lambda q, k, v: flashattn.flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, causal=True)
    compiled = torch.compile(varlen, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), varlen(q, k, v))
    heads_first = [t.detach().transpose(1, 2) for t in qkv(2, 9, 4, 16)]
    mask = torch.rand(2, 1, 9, 9) > 0.3
    compiled = torch.compile(lambda *a: sdpa(*a, attn_mask=mask), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(*heads_first), sdpa(*heads_first, attn_mask=mask), atol=1e-6)


def test_export_keeps_the_operator():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flashattn.flash_attn_func(q, k, v, causal=True)

    inputs = tuple(qkv(2, 17, 4, 16, grad=False))
    rows = torch.export.Dim("rows", min=2, max=512)
    program = torch.export.export(Attention(), inputs, dynamic_shapes=[{1: rows}] * 3)
    assert any("flashattn" in str(node.target) for node in program.graph.nodes)
    longer = qkv(2, 40, 4, 16, grad=False)
    assert torch.allclose(program.module()(*longer), Attention()(*longer), atol=1e-6)


def test_tracing_records_the_operator_not_its_result():
    inputs = qkv(1, 6, 2, 8, grad=False)
    traced = torch.jit.trace(lambda q, k, v: flashattn.flash_attn_func(q, k, v), tuple(inputs), check_trace=False)
    others = qkv(1, 6, 2, 8, grad=False, seed=1)
    assert torch.allclose(traced(*others), flashattn.flash_attn_func(*others))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_pairs_again(reentrant):
    inputs = qkv(1, 33, 2, 16)
    run = lambda q, k, v: flashattn.flash_attn_func(q, k, v, dropout_p=0.4, causal=True)
    torch.manual_seed(11)
    plain = run(*inputs)
    grads = torch.autograd.grad(plain.square().sum(), inputs)
    torch.manual_seed(11)
    again = checkpoint(run, *inputs, use_reentrant=reentrant)
    assert torch.equal(plain, again)
    again.square().sum().backward()
    for t, expected in zip(inputs, grads):
        math_.assert_same(t.grad, expected)


def test_a_compiler_knows_that_dropout_is_random():
    """Two equal calls drop different pairs, and a checkpoint that a compiler recomputes drops the same again."""
    torch._dynamo.reset()
    q, k, v = qkv(1, 33, 2, 16)
    run = lambda q, k, v: flashattn.flash_attn_func(q, k, v, dropout_p=0.4)
    twice = torch.compile(lambda *t: run(*t) - run(*t), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert (twice(q, k, v) != 0).any()
    torch._dynamo.reset()
    again = torch.compile(lambda *t: checkpoint(run, *t, use_reentrant=False), fullgraph=True, backend="aot_eager")
    torch.manual_seed(11)
    out = run(q, k, v)
    torch.manual_seed(11)
    ours = again(q, k, v)
    assert torch.equal(out, ours)
    for a, b in zip(torch.autograd.grad(ours.square().sum(), (q, k, v)), torch.autograd.grad(out.square().sum(), (q, k, v))):
        math_.assert_same(a, b)


def test_a_view_that_negates_is_read_as_what_it_shows():
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.complex64).conj().imag for _ in range(3))
    assert q.is_neg()
    expected = flashattn.flash_attn_func(*(t.resolve_neg() for t in (q, k, v)))
    assert torch.equal(flashattn.flash_attn_func(q, k, v), expected)
    leaves = [t.resolve_neg().requires_grad_() for t in (q, k, v)]
    out = flashattn.flash_attn_func(*leaves)
    dout = torch.randn(1, 5, 2, 8, dtype=torch.complex64).conj().imag
    for a, b in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True),
                    torch.autograd.grad(out, leaves, dout.resolve_neg())):
        math_.assert_same(a, b)


def test_the_default_device_changes_nothing():
    inputs = qkv(1, 9, 2, 8)
    torch.manual_seed(2)
    expected = flashattn.flash_attn_func(*inputs, dropout_p=0.5)
    torch.manual_seed(2)
    with torch.device("meta"):
        assert torch.equal(flashattn.flash_attn_func(*inputs, dropout_p=0.5), expected)


def test_double_backward_says_that_it_cannot():
    inputs = qkv(1, 5, 1, 8)
    dq, = torch.autograd.grad(flashattn.flash_attn_func(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()
    for options in (dict(dropout_p=0.1), dict(alibi_slopes=torch.ones(1))):
        out = flashattn.flash_attn_func(*inputs, **options)
        dq, = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            dq.sum().backward()


def test_only_the_gradients_that_are_wanted():
    q, k, v = qkv(1, 7, 2, 8)
    full = torch.autograd.grad(flashattn.flash_attn_func(q, k, v).square().sum(), (q, k, v))
    alone, = torch.autograd.grad(flashattn.flash_attn_func(q.detach(), k.detach(), v).square().sum(), v)
    math_.assert_same(alone, full[2])


def test_vmap_is_a_loop():
    q, k, v = qkv(3, 5, 2, 8, grad=False)
    out = torch.func.vmap(flashattn.flash_attn_func)(*(t.unsqueeze(1) for t in (q, k, v)))
    assert torch.equal(out.squeeze(1), flashattn.flash_attn_func(q, k, v))


def test_transforms_that_cannot_work_raise():
    q, k, v = qkv(1, 5, 2, 8, grad=False)
    run = lambda q: flashattn.flash_attn_func(q, k, v).sum()
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(run)(q)
    with pytest.raises(flashattn.UnsupportedError, match="forward-mode"):
        torch.func.jvp(run, (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(flashattn.UnsupportedError, match="forward-mode"):
        run(torch.autograd.forward_ad.make_dual(q, q))


def test_parameters_and_inference_mode():
    q, k, v = (torch.nn.Parameter(t.detach()) for t in qkv(1, 5, 2, 8))
    with torch.inference_mode():
        inside = flashattn.flash_attn_func(q, k, v)
    with torch.no_grad():
        assert torch.equal(flashattn.flash_attn_func(q, k, v), inside)
    assert torch.equal(flashattn.flash_attn_func(q, k, v).detach(), inside)


def test_the_short_way_is_the_long_way():
    q, k, v = (t.detach() for t in qkv(2, 19, 6, 24, heads_k=2))
    for options in (dict(), dict(causal=True), dict(window_size=(4, 2)), dict(window_size=(4, 9), causal=True),
                    dict(window_size=(-1, 3)), dict(softcap=1.5), dict(softmax_scale=0.0), dict(softmax_scale=-0.7)):
        short, short_lse, _ = flashattn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        long, long_lse, _ = flashattn.flash_attn_func(q.clone().requires_grad_(), k, v, return_attn_probs=True, **options)
        assert torch.equal(short, long) and torch.equal(short_lse, long_lse), options
        assert torch.equal(flashattn.flash_attn_func(q, k, v, **options), short)


EAGER = {"plain": dict(causal=True, window=(7, -1), softcap=2.0), "scale": dict(scale=0.0), "dropout": dict(dropout_p=0.3),
         "alibi": dict(alibi_slopes=[0.1, 0.2, 0.3, 0.4])}


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "packed"])
def test_an_eager_call_is_the_operator(name, layout):
    """Eager calls skip torch.library; what they give and their gradients are the operator's, bit for bit."""
    options = {key: torch.tensor(value) if key == "alibi_slopes" else value for key, value in EAGER[name].items()}
    if layout == "contiguous":
        leaves = qkv(2, 9, 4, 16, heads_k=2)
    elif layout == "heads_first":
        leaves = [t.detach().transpose(1, 2).requires_grad_() for t in qkv(2, 4, 9, 16)]
    else:
        leaves = list(torch.randn(2, 9, 3, 4, 16).unbind(2))
        leaves = [t.requires_grad_() for t in leaves]
    torch.manual_seed(3)
    out, lse, rng_state = torch_ops.attention(*leaves, **options)
    assert (rng_state is None) == (name != "dropout")
    window = options.get("window", (-1, -1))
    changes = {key: value for key, value in options.items() if key not in ("window", "scale")}
    ours = torch.ops.flashattn.forward(*leaves, *plain_options(**{"causal": False, **changes}, rng_state=rng_state,
                                                              window_left=window[0], window_right=window[1], scale=options.get("scale", 0.25)))
    assert "flashattn" not in type(out.grad_fn).__name__ and "flashattn" in type(ours[0].grad_fn).__name__
    assert torch.equal(out, ours[0]) and torch.equal(lse, ours[1]) and not lse.requires_grad
    dout = torch.randn(2, 9, 16, 4).transpose(2, 3)
    for wanted in (leaves, leaves[1:2]):
        for a, b in zip(torch.autograd.grad(out, wanted, dout, retain_graph=True),
                        torch.autograd.grad(ours[0], wanted, dout, retain_graph=True)):
            math_.assert_same(a, b)


def test_an_eager_call_of_varlen_is_the_operator():
    leaves, options = CASES["varlen"]()
    cu = lengths()
    run = lambda: torch_ops.attention(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=9, max_seqlen_k=9, causal=True,
                                      scale=0.3)[:2]
    out, lse = run()
    ours = torch.ops.flashattn.forward(*leaves, *options)
    assert torch.equal(out, ours[0]) and torch.equal(lse, ours[1])
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(ours[0], leaves, dout)):
        math_.assert_same(a, b)
    with torch.no_grad():
        assert torch.equal(run()[0], out)
    wide = torch.stack([cu, cu], 1)  # lengths that are not contiguous, or of another integer type, are copied
    for other in (wide[:, 0], cu.long()):
        again = flashattn.flash_attn_varlen_func(*leaves, other, other, 9, 9, softmax_scale=0.3, causal=True)
        assert torch.equal(again, out)


@pytest.mark.parametrize("kind", ["qkv", "kv", "varlen qkv", "varlen kv"])
def test_gradients_of_packed_tensors_are_those_of_their_parts(kind):
    own_q, varlen = kind.endswith(" kv") or kind == "kv", kind.startswith("varlen")
    shape = (12, 3 - own_q, 4, 16) if varlen else (2, 9, 3 - own_q, 4, 16)
    packed = torch.randn(*shape[:-1], 24)[..., :16].requires_grad_()  # its rows are not side by side
    q = torch.randn(*shape[:-3], 4, 16, requires_grad=True) if own_q else None
    name = f"flash_attn_{'varlen_' if varlen else ''}{'kvpacked' if own_q else 'qkvpacked'}_func"
    cu = lengths()
    rows = () if not varlen else (cu, cu, 9, 9) if own_q else (cu, 9)
    run = lambda: getattr(flashattn, name)(*([q] if own_q else []), packed, *rows, causal=True, return_attn_probs=True)[:2]
    out, lse = run()
    views = ([q] if own_q else []) + list(packed.unbind(-3))
    plain = flashattn.flash_attn_varlen_func if varlen else flashattn.flash_attn_func
    expected = plain(*views, *((cu, cu, 9, 9) if varlen else ()), causal=True)
    assert torch.equal(out, expected) and not lse.requires_grad
    leaves = [packed] + ([q] if own_q else [])
    for dout in (torch.randn_like(out), torch.ones(()).expand_as(out)):  # the second is the gradient of out.sum()
        for a, b in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True),
                        torch.autograd.grad(expected, leaves, dout, retain_graph=True)):
            math_.assert_same(a, b)
    dpacked, = torch.autograd.grad(run()[0].square().sum(), packed, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dpacked.sum().backward()
    with pytest.raises(flashattn.InvalidError, match="third last"):
        getattr(flashattn, name)(*([q] if own_q else []), packed[..., :1, :, :], *rows)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_who_looks_on_sees_the_operators():
    """A dispatch mode, a compiled backward and hooks on saved tensors get what they need though the forward was eager."""
    inputs = qkv(1, 9, 2, 8)
    run = lambda: flashattn.flash_attn_func(*inputs, causal=True)
    expected = torch.autograd.grad(run().square().sum(), inputs)
    with Recorder() as recorder:
        run().sum().backward()
    assert [n for n in recorder.names if "flashattn" in n] == ["flashattn.forward.default", "flashattn.backward.default"]
    with torch.autograd.graph.save_on_cpu():
        out = run()
    for a, b in zip(torch.autograd.grad(out.square().sum(), inputs), expected):
        assert torch.equal(a, b)
    for t in inputs:
        t.grad = None
    loss = run().square().sum()
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable  # its name before PyTorch 2.6
    with enable(torch.compile(backend="aot_eager")):
        loss.backward()
    for t, b in zip(inputs, expected):
        assert torch.allclose(t.grad, b, atol=1e-6)


def test_what_was_written_to_between_the_passes_is_an_error():
    for changed in range(4):
        inputs, cu = [t * 1 for t in CASES["varlen"]()[0]], lengths()
        out = flashattn.flash_attn_varlen_func(*inputs, cu, cu, 9, 9)
        (*inputs, cu)[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_pytorchs_threads_are_ours():
    """A second pool of threads would wait in the way of the first: the package runs on PyTorch's OpenMP threads."""
    script = """
import os, torch, flashattn
torch.randn(1 << 20).exp()  # PyTorch's threads start
torch.randn(300, 300) @ torch.randn(300, 300)
before = len(os.listdir("/proc/self/task"))
q = torch.randn(2, 700, 4, 64)
out = flashattn.flash_attn_func(q, q, q)
leaf = q.clone().requires_grad_()
flashattn.flash_attn_func(leaf, leaf, leaf).sum().backward()
print(torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
torch.set_num_threads(1)
assert torch.equal(out, flashattn.flash_attn_func(q, q, q))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                           env={**os.environ, "FLASH_ATTN_NUM_THREADS": "4"})
    assert found.stdout.split()[1] == "0", found.stdout


def test_threads_do_not_disturb_each_other():
    expected = {n: flashattn.flash_attn_func(*qkv(1, 20 + n, 2, 16, grad=False, seed=n), causal=True) for n in range(6)}
    wrong = []

    def work(n):
        q, k, v = qkv(1, 20 + n, 2, 16, grad=n % 2 == 0, seed=n)
        for _ in range(30):
            out = flashattn.flash_attn_func(q, k, v, causal=True)
            if n % 2 == 0:
                out.sum().backward()
            if not torch.equal(out.detach(), expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in expected]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


class Attended(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, n):
        return flashattn.flash_attn_func(*qkv(1, 300, 4, 32, grad=False, seed=n), causal=True)


def test_fork_in_a_data_loader_worker():
    data = Attended()
    expected = [data[n] for n in range(4)]  # the parent's threads exist before the fork
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for ours, theirs in zip(loader, expected):
        assert torch.equal(ours, theirs)


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, 2, 8))
        return self.out(flashattn.flash_attn_qkvpacked_func(heads, causal=True).flatten(-2))


def ddp_worker(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    net = torch.nn.parallel.DistributedDataParallel(Tiny())
    data = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(9))
    net(data[rank]).square().mean().backward()
    torch.save([p.grad for p in net.parameters()], f"{folder}/grads{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_of_ddp_average_their_gradients(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(ddp_worker, args=(str(tmp_path),), nprocs=2)
    net = Tiny()
    data = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(9))
    net(data.flatten(0, 1)).square().mean().backward()
    for rank in range(2):
        for ours, expected in zip(torch.load(tmp_path / f"grads{rank}.pt"), net.parameters()):
            assert torch.allclose(ours, expected.grad, atol=1e-6)
