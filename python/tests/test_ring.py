"""Ring attention over processes: what each rank gets is its rows of the plain call over the whole sequence; what goes wrong on one
rank is told on all of them, in time. Worlds of processes are started once, and each runs all of its cases; a test looks at one.

    test_ring.py FOLDER DEVICE RANKS ...      forks a world of so many processes, and then the next
    test_ring.py FOLDER DEVICE RANK/RANKS     is one process of a world
"""

import contextlib
import datetime
import faulthandler
import json
import os
import pathlib
import signal
import subprocess
import sys
import traceback

import attention_math as math_
import flashattn
import pytest
import torch
import torch.distributed as dist
from flashattn import ring, torch_ops
from flashattn.ring import ring_flash_attn_func, ring_gather, ring_scatter, ring_share

LAYOUTS = ("contiguous", "zigzag", "striped")
MASKS = {"none": {}, "causal": dict(causal=True), "window": dict(window_size=(9, 4)),
         "causal window": dict(causal=True, window_size=(11, -1), softcap=2.0, softmax_scale=0.3)}
F32, BF16 = torch.float32, torch.bfloat16
SECONDS = 90  # a world has; what hangs in one ends by itself and fails


# ---- in a rank's process ----


class World:
    """One rank's view; every case is called with it on every rank."""

    def __init__(self, rank, ranks, device):
        self.rank, self.ranks, self.device = rank, ranks, device
        self.hosts = dist.new_group(backend="gloo") if device == "cuda" else None

    def make(self, seqlens, dtype=F32, d=16, dv=24, heads=(4, 2)):
        """q, k, v and dout of the whole, the same on every rank."""
        shapes = [(2, seqlens[n > 0], heads[n > 0], dv if n == 2 else d) for n in range(3)] + [(2, seqlens[0], heads[0], dv)]
        return [torch.randn(*shape, generator=math_.seeded(n)).to(dtype) for n, shape in enumerate(shapes)]

    def own(self, whole, layout, group=None):
        return [ring_scatter(t, layout, group).requires_grad_() for t in whole]

    def check(self, seqlens, layout, dtype=F32, group=None, **options):
        whole = self.make(seqlens, dtype)
        *leaves, dout = self.own(whole, layout, group)
        out, lse, none = ring_flash_attn_func(*leaves, return_attn_probs=True, layout=layout, seqlen=seqlens, group=group,
                                              host_group=self.hosts if group is None else None, **options)
        assert none is None and not lse.requires_grad
        ours = out, *torch.autograd.grad(out, leaves, dout)
        *inputs, dout = whole
        inputs = [t.requires_grad_() for t in inputs]
        out, lse_whole, _ = flashattn.flash_attn_func(*inputs, return_attn_probs=True, **options)
        expected = out, *torch.autograd.grad(out, inputs, dout)
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, expected):
            same_rows(a, b, ring_share(b.shape[1], layout, group), name)
        torch.testing.assert_close(lse, lse_whole[..., ring_share(seqlens[0], layout, group)], atol=1e-5, rtol=1e-6)

    def same(self, a, b):
        """Bit for bit; a GPU may take another kernel for other strides or fewer results."""
        if self.device == "cpu":
            math_.assert_same(a, b)
        else:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    def fails(self, where, kind, match, call):
        """`call` raises `kind` on the rank `where`; on the others the sentence that it failed."""
        mine = self.rank == where
        with pytest.raises(kind if mine else flashattn.TransportError, match=match if mine else f"rank {where} failed"):
            call()


def same_rows(ours, whole, rows, name):
    expected = whole[:, rows]
    assert ours.dtype == expected.dtype and ours.shape == expected.shape, name
    if expected.numel() == 0:
        return
    scale, exact = whole.abs().max().item(), ours.dtype == F32
    off, turned = (2.0**-6, 1e-4) if not exact else (3e-6, 1e-11) if ours.is_cpu else (2e-5, 1e-9)
    assert (ours - expected).abs().max() <= scale * off, name
    ours, expected = ours.double().flatten(), expected.double().flatten()
    if expected.norm() > 0.1 * scale:
        assert torch.nn.functional.cosine_similarity(ours, expected, 0) > 1 - turned, name


def grid(layout, mask):
    def case(world):
        for dtype in (F32, BF16):
            for seqlens in ((37, 37), (64, 64), (19, 41)):
                world.check(seqlens, layout, dtype, **MASKS[mask])
        world.check((23, 15), layout, **MASKS[mask])  # under a causal mask the first queries see nothing

    return case


def few_rows(world):
    """Fewer positions than ranks, or chunks: some ranks have none, and nothing travels for them."""
    for layout in LAYOUTS:
        for seqlens in ((3, 3), (2, 5), (5, 2), (1, 1)):
            world.check(seqlens, layout, causal=True)


def sinks_and_their_gradient(world):
    whole = world.make((37, 37))
    sinks = torch.randn(4, generator=math_.seeded(9)).requires_grad_()
    *leaves, dout = world.own(whole, "zigzag")
    out = ring_flash_attn_func(*leaves, causal=True, sinks=sinks, seqlen=37, host_group=world.hosts)
    *ours, dsinks = torch.autograd.grad(out, (*leaves, sinks), dout)
    dist.all_reduce(dsinks)
    inputs = [t.requires_grad_() for t in whole[:3]]
    expected, _, _ = torch_ops.attention(*inputs, causal=True, sinks=sinks)
    *grads, dsinks_whole = torch.autograd.grad(expected, (*inputs, sinks), whole[3])
    for a, b in zip((out, *ours), (expected, *grads)):
        same_rows(a, b, ring_share(37), "with sinks")
    torch.testing.assert_close(dsinks, dsinks_whole, atol=1e-5, rtol=1e-5)


def strides_are_read_in_place(world):
    rows = len(ring_share(48))
    packed = torch.randn(2, rows, 3, 4, 16).unbind(2)
    heads_first = [t.contiguous().transpose(1, 2).contiguous().transpose(1, 2) for t in packed]
    results = []
    for given in (packed, heads_first, [t.contiguous() for t in packed]):
        leaves = [t.detach().requires_grad_() for t in given]
        out = ring_flash_attn_func(*leaves, causal=True, seqlen=48, deterministic=True, host_group=world.hosts)
        out.sum().backward()  # its dout is one number, broadcast
        results.append([out, *(t.grad for t in leaves)])
    for result in results[:2]:
        for a, b in zip(result, results[2]):
            world.same(a, b)


def without_a_gradient_nothing_is_kept(world):
    leaves = world.own(world.make((48, 48)), "striped")[:3]
    run = lambda **more: ring_flash_attn_func(*leaves, causal=True, layout="striped", host_group=world.hosts, **more)
    expected, lse, _ = run(return_attn_probs=True)
    with torch.no_grad():
        out, again, _ = run(return_attn_probs=True)
        world.same(run(), expected)
    assert out.grad_fn is None
    world.same(out, expected)
    world.same(again, lse)


def only_some_gradients(world):
    q, k, v, dout = world.own(world.make((48, 48)), "zigzag")
    run = lambda *leaves: ring_flash_attn_func(*leaves, causal=True, deterministic=True, host_group=world.hosts)
    expected = torch.autograd.grad(run(q, k, v), (q, k, v), dout)
    for wanted in ((0,), (1,), (1, 2)):
        leaves = [t if n in wanted else t.detach() for n, t in enumerate((q, k, v))]
        for n, grad in zip(wanted, torch.autograd.grad(run(*leaves), [leaves[n] for n in wanted], dout)):
            world.same(grad, expected[n])


def checkpointing_runs_it_again(world):
    *leaves, dout = world.own(world.make((48, 48)), "zigzag")
    run = lambda *leaves: ring_flash_attn_func(*leaves, causal=True, deterministic=True, host_group=world.hosts)
    expected = torch.autograd.grad(run(*leaves), leaves, dout)
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False), leaves, dout)
    for a, b in zip(again, expected):
        world.same(a, b)


def a_second_derivative_is_refused(world):
    q, k, v, _ = world.own(world.make((48, 48)), "zigzag")
    out = ring_flash_attn_func(q, k, v, causal=True, host_group=world.hosts)
    dq, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


def what_travels_is_the_workspace(world):
    """Between the ranks views of the one tensor that a pass has for all, copied nowhere; the notes by the hosts' group if there
    is one."""
    q, k, v, dout = world.own(world.make((48, 48)), "zigzag")
    group, hosts, good, seen = dist.new_group(), dist.new_group(backend="gloo"), dist.batch_isend_irecv, []
    dist.batch_isend_irecv = lambda ops: seen.extend(ops) or good(ops)
    try:
        out = ring_flash_attn_func(q, k, v, causal=True, group=group, host_group=hosts)
        forward, seen = seen, []
        out.backward(dout)
    finally:
        dist.batch_isend_irecv = good
    kv_bytes = 2 * (48 // world.ranks) * 2 * (16 + 24) * 4
    for ops, transfers, times in ((forward, world.ranks - 1, world.ranks - 1), (seen, world.ranks + 1, 2 * world.ranks - 1)):
        notes = [op.tensor for op in ops if op.group is hosts]
        moved = [op.tensor for op in ops if op.group is group]
        assert len(notes) == 2 * 2 * (world.ranks - 1) and len(moved) == 2 * transfers and len(notes) + len(moved) == len(ops)
        assert all(t.is_cpu and t.numel() < 1000 for t in notes)
        assert sum(t.numel() for t in moved) == 2 * times * kv_bytes  # K and V and their gradients, sent and received
        assert all(t._is_view() for t in moved) and len({t.untyped_storage().data_ptr() for t in moved}) == 1


def dealt_and_gathered(world):
    for layout in LAYOUTS:
        for whole in (torch.randn(2, 37, 3).bfloat16(), torch.arange(37), torch.rand(37, 2) > 0.5):
            dim = 1 if whole.dim() == 3 else 0
            own = ring_scatter(whole, layout, dim=dim)
            assert own.shape[dim] == len(ring_share(37, layout))
            assert torch.equal(ring_gather(own, layout, dim=dim, seqlen=37), whole)
    x = torch.randn(2, 48, requires_grad=True)
    ring_scatter(x).sum().backward()
    assert x.grad.sum() == 2 * len(ring_share(48)) and (x.grad[:, ring_share(48)] == 1).all()
    assert torch.equal(ring_gather(ring_scatter(x.detach())), x)
    with pytest.raises(flashattn.InvalidError, match=r"tensor.shape\[1\] is"):
        ring_gather(torch.ones(1, 5), seqlen=100)


def a_group_of_some_ranks(world):
    """Its ranks have other numbers than the world's."""
    some = list(range(1, world.ranks))
    group = dist.new_group(some)
    if world.rank in some:
        for layout in LAYOUTS:
            world.check((37, 37), layout, group=group, causal=True)
    else:
        with pytest.raises(flashattn.InvalidError, match="not in the group"):
            ring_share(10, group=group)


# ---- what goes wrong ----


def host_groups(world):
    return (world.hosts,) if world.hosts is not None else (None, dist.new_group())


def what_one_rank_was_given_fails_on_all(world):
    q, k, v, dout = world.own(world.make((37, 37)), "zigzag")
    last = world.ranks - 1
    for hosts in host_groups(world):
        for where in (0, last):
            def attend(q, k, v, **changes):
                changes = changes if world.rank == where else {}
                return ring_flash_attn_func(q, k, v, **{**dict(seqlen=37, causal=True, host_group=hosts), **changes})

            there = lambda bad, good: bad if world.rank == where else good
            world.fails(where, flashattn.InvalidError, r"q.shape\[1\] is .*, expected",
                        lambda: attend(there(q[:, 1:], q), k, v))
            world.fails(where, flashattn.InvalidError, "expected 4", lambda: attend(q, there(k[0], k), v))
            world.fails(where, flashattn.InvalidError, "bool", lambda: attend(q, there(k > 0, k), v))
            world.fails(where, flashattn.InvalidError, "expected contiguous, zigzag", lambda: attend(q, k, v, layout="zigzig"))
            world.fails(where, flashattn.InvalidError, "expected two numbers", lambda: attend(q, k, v, window_size=3))
            world.fails(where, flashattn.InvalidError, "seqlen is '37'", lambda: attend(q, k, v, seqlen="37"))
            with pytest.raises(flashattn.InvalidError, match="another scale"):
                attend(q, k, v, softmax_scale=0.5)
            for bad, match in ((dout[:, 1:], "dout"), (dout.double(), "float64")):
                out = attend(q, k, v)
                world.fails(where, flashattn.InvalidError, match,
                            lambda: there(lambda: backward_of(out, bad), lambda: out.backward(dout))())
    world.check((37, 37), "zigzag", causal=True)  # the transport can be used again


def backward_of(out, dout):
    """out.backward of a dout that autograd would not let through."""
    return out.grad_fn.ring.backward(dout, *out.grad_fn.saved_tensors, (True, True, True, False))


def shares_of_other_lengths_need_the_length(world):
    q, k, v, _ = world.own(world.make((37, 37)), "zigzag")
    with pytest.raises(flashattn.InvalidError, match="another seqlen_q"):
        ring_flash_attn_func(q, k, v, causal=True, host_group=world.hosts)


def what_a_ring_cannot(world):
    q, k, v, _ = world.own(world.make((48, 48)), "zigzag")
    with pytest.raises(flashattn.UnsupportedError, match="dropout is given in a ring, expected none"):
        ring_flash_attn_func(q, k, v, 0.1, causal=True, host_group=world.hosts)
    with pytest.raises(flashattn.UnsupportedError, match="alibi_slopes is given in a ring, expected none"):
        ring_flash_attn_func(q, k, v, alibi_slopes=torch.ones(4), host_group=world.hosts)
    for others in ([0], list(range(world.ranks))[:-1]):
        group = dist.new_group(others, backend="gloo")
        if world.rank in others and world.hosts is None:
            with pytest.raises(flashattn.InvalidError, match="host_group has other ranks"):
                ring_flash_attn_func(q, k, v, host_group=group)


def a_transport_that_fails(world):
    """At the n-th transfer on rank 0, which raises what it was; the others raise when their time is up."""
    q, k, v, dout = world.own(world.make((48, 48)), "zigzag")
    good, calls = dist.batch_isend_irecv, []

    def bad(ops):
        calls.append(ops)
        if len(calls) == number:
            raise OSError("the cable is out")
        return good(ops)

    for number, backward in ((1, False), (world.ranks + 1, True)):
        group = dist.new_group(timeout=datetime.timedelta(seconds=2))
        out = ring_flash_attn_func(q, k, v, causal=True, group=group)
        calls.clear()
        dist.batch_isend_irecv = bad if world.rank == 0 else good
        try:
            with pytest.raises(OSError if world.rank == 0 else RuntimeError, match="cable" if world.rank == 0 else None) as caught:
                out.backward(dout) if backward else ring_flash_attn_func(q, k, v, causal=True, group=group)
        finally:
            dist.batch_isend_irecv = good
        assert isinstance(caught.value.__cause__, flashattn.TransportError), caught.value
        assert "on rank" in str(caught.value.__cause__) and "returned 1" in str(caught.value.__cause__)
    world.check((37, 37), "zigzag", causal=True)  # another group has not suffered


CASES = {f"{layout}, {mask}": grid(layout, mask) for layout in LAYOUTS for mask in MASKS}
CASES.update({case.__name__: case for case in (
    few_rows, sinks_and_their_gradient, strides_are_read_in_place, without_a_gradient_nothing_is_kept, only_some_gradients,
    checkpointing_runs_it_again, a_second_derivative_is_refused, what_travels_is_the_workspace, dealt_and_gathered, a_group_of_some_ranks,
    what_one_rank_was_given_fails_on_all, shares_of_other_lengths_need_the_length, what_a_ring_cannot, a_transport_that_fails)})
ON_GPUS = [name for name in CASES if name != "a_transport_that_fails"]  # NCCL's watchdog would end the process
WORLDS = {2: ON_GPUS, 3: [name for name in CASES if name != "checkpointing_runs_it_again"], 4: ["zigzag, causal", "few_rows", "a_group_of_some_ranks"]}


def run_rank(rank, ranks, folder, device):
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=15))
    world, results = World(rank, ranks, device), {}
    for name in ON_GPUS if device == "cuda" else WORLDS[ranks]:
        torch.manual_seed(0)  # the same numbers on every rank
        try:
            CASES[name](world)
            results[name] = "passed"
        except BaseException:
            results[name] = traceback.format_exc()
        pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
        if results[name] != "passed":
            os._exit(1)  # the ranks are out of step now: the others' transfers end with this process
    dist.barrier()
    dist.destroy_process_group()


def fork_world(ranks, folder, device):
    """Run a world to its end. Its processes are copies of this one, which has imported PyTorch once for all and started no thread.
    True in each of them; the first gets their ends into the logs."""
    pathlib.Path(folder).mkdir()
    forked = []
    for rank in range(ranks):
        forked.append(os.fork())
        if forked[rank] == 0:
            log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if device == "cuda":  # which no fork survives, once something has asked for it
                os.execv(sys.executable, [sys.executable, __file__, folder, device, f"{rank}/{ranks}"])
            run_rank(rank, ranks, folder, device)
            return True
    for rank, process in enumerate(forked):
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with open(f"{folder}/rank{rank}.log", "a") as log:
            log.write(f"\nrank {rank} of {ranks} ended with {code}")
    return False


# ---- in pytest's ----


def run_worlds(sizes, folder, device="cpu"):
    """Run worlds of so many ranks to their ends: of each, for each rank, what became of its cases, and what it printed."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    process = subprocess.Popen([sys.executable, __file__, str(folder), device, *map(str, sizes)], env=environment, stdin=subprocess.DEVNULL,
                               start_new_session=True)
    try:
        process.wait(SECONDS * len(sizes) + 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks, if there are any
        process.wait()
    return {ranks: [told_by(rank, pathlib.Path(folder, f"world{ranks}")) for rank in range(ranks)] for ranks in sizes}


def told_by(rank, folder):
    told, log = folder / f"rank{rank}.json", folder / f"rank{rank}.log"
    return json.loads(told.read_text()) if told.exists() else {}, log.read_text() if log.exists() else f"rank {rank} never began"


def assert_passed(found, name):
    """The case passed on every rank. Of one that was not reached the first failure is told."""
    if all(results.get(name) == "passed" for results, _ in found):
        return
    failures = [f"rank {rank}, {case}: {text}" for rank, (results, _) in enumerate(found) for case, text in results.items()
                if text != "passed"]
    pytest.fail("\n".join(failures or [log for _, log in found]), pytrace=False)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this PyTorch has no torch.distributed with Gloo")
    return run_worlds(WORLDS, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize("ranks, name", [(ranks, name) for ranks, names in WORLDS.items() for name in names])
def test_over_processes(worlds, ranks, name):
    assert_passed(worlds[ranks], name)


@pytest.mark.parametrize("ranks", WORLDS)
def test_every_process_of_a_world_ends_well(worlds, ranks):
    for _, log in worlds[ranks]:
        assert log.endswith("ended with 0"), log


def test_two_gpus_and_nccl(tmp_path):
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    found = run_worlds([2], tmp_path, "cuda")[2]
    for name in ON_GPUS:
        assert_passed(found, name)


# ---- one rank, without torch.distributed ----


def test_alone_it_is_the_plain_call():
    leaves = [torch.randn(2, 37, heads, 16, generator=math_.seeded(heads)).requires_grad_() for heads in (4, 2, 1)]
    leaves[2] = torch.randn(2, 37, 2, 24).requires_grad_()
    for layout in LAYOUTS:
        for options in MASKS.values():
            out, lse, none = ring_flash_attn_func(*leaves, layout=layout, return_attn_probs=True, **options)
            expected, lse_whole, _ = flashattn.flash_attn_func(*leaves, return_attn_probs=True, **options)
            assert none is None and torch.equal(out, expected) and torch.equal(lse, lse_whole)
            dout = torch.randn_like(out)
            for a, b in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout)):
                math_.assert_same(a, b)
    assert torch.equal(ring_share(5), torch.arange(5))
    x = torch.randn(2, 5)
    assert torch.equal(ring_scatter(x), x) and torch.equal(ring_gather(x), x)


def test_alone_the_same_is_refused():
    q = torch.randn(1, 8, 2, 16)
    for kind, match, changes in ((flashattn.UnsupportedError, "dropout is given in a ring", dict(dropout_p=0.5)),
                                 (flashattn.InvalidError, "layout is 'ring'", dict(layout="ring")),
                                 (flashattn.InvalidError, r"q.shape\[1\] is 8, expected 9", dict(seqlen=9)),
                                 (flashattn.InvalidError, "seqlen is 8.5", dict(seqlen=8.5)),
                                 (flashattn.InvalidError, r"seqlen is \(8, 8, 8\)", dict(seqlen=(8, 8, 8)))):
        with pytest.raises(kind, match=match):
            ring_flash_attn_func(q, q, q, **changes)
    with pytest.raises(flashattn.InvalidError, match="q is ndarray: expected a PyTorch tensor"):
        ring_flash_attn_func(q.numpy(), q, q)
    for seqlen, match in ((-1, "-1 positions"), (2**70, "seqlen is 11"), (1.5, "seqlen is 1.5: expected a number of positions$")):
        with pytest.raises(flashattn.InvalidError, match=match):
            ring_share(seqlen)


def test_torch_compile_goes_round_it():
    leaves = [torch.randn(1, 9, 2, 16).requires_grad_() for _ in range(3)]
    run = lambda q, k, v: ring_flash_attn_func(q * 2, k, v, causal=True).square().sum()
    expected = torch.autograd.grad(run(*leaves), leaves)
    for a, b in zip(torch.autograd.grad(torch.compile(run, backend="aot_eager")(*leaves), leaves), expected):
        assert torch.allclose(a, b, atol=1e-6)


def test_shares_are_the_library_s():
    """Each position is some rank's, and a causal zigzag or striped share is as much work as another."""
    for layout in LAYOUTS:
        for ranks in (1, 2, 3, 5):
            shares = [ring._positions(37, layout, ranks, rank) for rank in range(ranks)]
            assert all(share.dtype == torch.int64 and (share.diff() > 0).all() for share in shares)
            assert torch.equal(torch.cat(shares).sort().values, torch.arange(37))
            if layout != "contiguous":
                work = [int((share + 1).sum()) for share in shares]
                assert max(work) - min(work) < 4 * 37
    assert ring._positions(8, "zigzag", 2, 0).tolist() == [0, 1, 6, 7]


def test_the_package_itself_needs_no_torch():
    script = "import sys; import flashattn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


if __name__ == "__main__":
    if "/" in sys.argv[3]:
        run_rank(*map(int, sys.argv[3].split("/")), *sys.argv[1:3])
        sys.exit()
    import torch._dynamo  # the first call would, in each process
    for size in sys.argv[3:]:
        if fork_world(int(size), f"{sys.argv[1]}/world{size}", sys.argv[2]):
            break
