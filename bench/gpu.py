#!/usr/bin/env python3
"""Time flashattn and its peers on one GPU over the FlashAttention papers' grid, in one run, and check every answer.

    make && python3 bench/gpu.py [--json FILE] [--head-dims 64,192:128,256] [--seqlens 512,...,16384] [--passes forward] [--quick]
                                 [--math] [--flex] [--varlen] [--deterministic] [--portable] [--fp8] [--softcap 30] [--alibi] [--pages 64] [--dropout 0.1]
                                 [--fa3 LIBRARY]
    make && python3 bench/gpu.py --decode [--head-dims 128,64] [--queries 1,4,16] [--batches 1,8,64] [--seqlens 1024,...,131072] [--fa3 LIBRARY]

bfloat16, hidden dimension 2048, 16384 tokens, no mask and causal, forward and backward; 192:128 is a head_dim of V of its own. Peers: PyTorch's SDPA backends (math:
standard attention; efficient; flash, which is FlashAttention-2; cuDNN) and with --flex FlexAttention, which torch.compile makes
through Triton, anew for each shape and pass. With --varlen sequences are packed (cu_seqlens), the longest as long as said and the
others of random lengths, and the peers are the calls that take such: PyTorch's varlen_attn (flash) and cuDNN's. With --deterministic
the backward's sums have a fixed order, ours and the peers' that can. --portable adds our kernels for any GPU, --fp8 our forward with FP8 inputs;
then all have the same inputs, numbers that FP8 holds. --fa3 adds FlashAttention-3 from its library (fa3.py says where to get one). --softcap
and --alibi are options of ours and FlexAttention's alone, Q then 4 times as large; --pages, of the forward alone, puts our K and V into shuffled
pages of so many keys, while the peers have theirs in one piece, and so has `whole`, ours again. --dropout drops pairs, ours those that Philox names,
written here once more; which ones the peers drop is not known, so they are timed and not checked. TFLOP/s count 4 s^2 d h b, half when causal, 2.5
times for the backward (of 192:128 2 s^2 h b and 6 s^2 h b for each of 192 columns, 2 and 4 for each of V's). Each other answer is compared with float64 on one head first; a wrong one is shown as WRONG and makes the exit status 1. Every
time is the median of several groups of launches between two events; ours and the peers take turns, in random order. FILE is written anew after each line.

--decode: few queries of 32 heads on the keys of 8, no mask. GB/s count K and V once (and Q and O), beside what reading as many bytes
(a sum) and copying half of them reach. Keys lie in one piece or in pages of 16, 64 and 256 (or of --pages alone),
shuffled; `by batch` is ours with num_splits -1. Calls are replayed by a CUDA
graph, each on keys of its own, so that no key is still in L2 from the call before and no host is timed.
"""

import argparse
import ctypes
import functools
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
if (ROOT / "build" / "libflashattn.so").exists():  # else the installed package
    os.environ.setdefault("FLASHATTN_LIBRARY", str(ROOT / "build" / "libflashattn.so"))
    sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import flashattn.torch_ops  # noqa: E402, F401 - so that kernels are compiled as for any user of PyTorch
import fa3  # noqa: E402
import head_dims  # noqa: E402
from flashattn import _call, _native  # noqa: E402

DEVICE, TOKENS, HIDDEN, FP8 = "cuda", 16384, 2048, torch.float8_e4m3fn
PEERS = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
         "cudnn": SDPBackend.CUDNN_ATTENTION}


def packed_lengths(longest):
    """The longest in the middle, others between 1 and it, TOKENS in all; the same each time."""
    draw, lengths = random.Random(longest), [longest]
    while sum(lengths) < TOKENS:
        lengths.append(min(draw.randint(1, longest), TOKENS - sum(lengths)))
    return [*lengths[1 : len(lengths) // 2 + 1], longest, *lengths[len(lengths) // 2 + 1 :]]


SEED, WORD = 1234567890123, 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 of Salmon et al. (SC 2011), four numbers of 32 bits in int64."""
    a, b, c, d = counter
    for n in range(10):
        at, by = 0xD2511F53 * a, 0xCD9E8D57 * c
        keys = [k + n * step & WORD for k, step in zip(key, (0x9E3779B9, 0xBB67AE85))]
        a, b, c, d = (by >> 32 & WORD) ^ b ^ keys[0], by & WORD, (at >> 32 & WORD) ^ d ^ keys[1], at & WORD
    return a, b, c, d


def kept_pairs(seqlen, p):
    """What dropout multiplies P of head 0 of batch 0 with: 0 or 1 / (1 - p), p in units of 2^-16. A call's numbers of 16 bits go to rows i, i + 8 and columns
    j, j + 1, j + 8, j + 9 of a block of 16 x 16."""
    threshold, blocks = round(p * 65536), seqlen // 16
    block, lane = torch.arange(blocks, device=DEVICE), torch.arange(32, device=DEVICE)
    zero = torch.zeros(blocks, blocks, 32, dtype=torch.int64, device=DEVICE)
    words = torch.stack(philox((block[None, :, None] + zero, block[:, None, None] * 32 + lane + zero, zero, zero), (SEED & WORD, SEED >> 32)))
    numbers = torch.stack((words & 0xFFFF, words >> 16)).view(2, 2, 2, blocks, blocks, 8, 4)  # i // 8, j // 8, j % 2, blocks, i % 8, j % 8 // 2
    return (numbers >= threshold).permute(3, 0, 5, 4, 1, 6, 2).reshape(seqlen, seqlen) / (1 - threshold / 65536)


class Cell:
    """One problem: inputs [batch, seqlen, heads, d], V d_v, or packed [tokens, heads, d], and what is expected of head 0 of batch 0, or of the
    longest sequence."""

    def __init__(self, d, seqlen, causal, options, d_v=None):
        d_v = d_v or d
        packed, fp8 = options.varlen, options.fp8
        self.d, self.d_v, self.seqlen, self.causal, self.packed, self.deterministic = d, d_v, seqlen, causal, packed, options.deterministic
        self.softcap, self.page, self.slopes, self.dropout = options.softcap, options.pages, None, options.dropout
        self.heads, self.lengths = HIDDEN // d, packed_lengths(seqlen) if packed else [seqlen] * (TOKENS // seqlen)
        shape = (TOKENS, self.heads) if packed else (len(self.lengths), seqlen, self.heads)
        if packed:
            self.cu = torch.tensor([sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)], device=DEVICE, dtype=torch.int32)
            self.first = sum(self.lengths[: self.lengths.index(seqlen)])
        self.q, self.k, self.v, self.dout = (torch.randn(*shape, n, device=DEVICE, dtype=torch.bfloat16) for n in (d, d, d_v, d_v))
        if fp8:
            self.q, self.k, self.v = (t.to(FP8).to(torch.bfloat16) for t in (self.q, self.k, self.v))
        if options.alibi:
            self.slopes = 2.0 ** -(torch.arange(1, self.heads + 1, device=DEVICE) * 8 / self.heads)
        if options.alibi or self.softcap:
            self.q *= 4  # so that they matter
        q, k, v = (self.one(t).double().requires_grad_() for t in (self.q, self.k, self.v))
        scores = q @ k.T * d**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if options.alibi:
            position = torch.arange(seqlen, device=DEVICE)
            scores = scores - self.slopes[0].double() * (position[:, None] - position).abs()
        if causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
        weights = torch.softmax(scores, -1)
        out = (weights * kept_pairs(seqlen, self.dropout) if self.dropout else weights) @ v
        self.truth = [out.detach(), *torch.autograd.grad(out, (q, k, v), self.one(self.dout).double())]

    def one(self, tensor):
        return tensor[self.first : self.first + self.seqlen, 0] if self.packed else tensor[0, :, 0]

    def flops(self, backward):
        full = 2 * sum(n**2 for n in self.lengths) * (self.d + self.d_v) * self.heads
        full *= head_dims.backward_share((self.d, self.d_v)) if backward else 1
        return full / 2 if self.causal else full

    def wrong(self, results, first, bound=1e-2):
        """The largest relative L2 error, or None if all is well. results are as the inputs."""
        worst = 0.0
        for got, expected in zip(results, self.truth[first:]):
            error = (self.one(got).double() - expected).norm() / expected.norm()
            worst = max(worst, error.item()) if error == error else float("nan")
        return None if worst <= bound else worst


def ours(cell, context=None):
    """(forward, backward): each runs once and returns its results. context: where the best kernels are not wanted."""
    q, k, v = cell.q, cell.k, cell.v
    lengths = {"cu_seqlens_q": cell.cu, "cu_seqlens_k": cell.cu, "max_seqlen_q": cell.seqlen, "max_seqlen_k": cell.seqlen} if cell.packed else {}
    table = None
    if cell.page:
        count = k.shape[1] // cell.page
        table = torch.randperm(k.shape[0] * count, device=DEVICE)
        paged = [torch.empty_like(t).view(-1, cell.page, *t.shape[2:]) for t in (k, v)]
        for to, t in zip(paged, (k, v)):
            to[table] = t.view_as(to)
        (k, v), table = paged, table.to(torch.int32).view(-1, count)
    call = _call.Call(q, k, v, causal=cell.causal, deterministic=cell.deterministic, softcap=cell.softcap, alibi_slopes=cell.slopes, block_table=table,
                      dropout_p=cell.dropout, seed=SEED, **lengths)
    call.context = context
    out = torch.full_like(cell.dout, float("nan"))
    grads = [torch.full_like(t, float("nan")) for t in (cell.q, cell.k, cell.v)]
    _, lse = call.forward(out)

    def forward():
        _call.check(_call.lib.flash_attn_forward(context or _native.context, call.address, call._exec()))
        return [out]

    def backward():
        call.backward(cell.dout, out, lse, *grads)
        return grads

    return forward, backward


def whole(cell):
    """Ours, where the cell has pages, with keys in one piece."""
    page, cell.page = cell.page, 0
    runs = ours(cell)
    cell.page = page
    return runs


def fp8(cell, context=None):
    """Ours with FP8 inputs; there is no backward."""
    call = _call.Call(*(t.to(FP8) for t in (cell.q, cell.k, cell.v)), causal=cell.causal)
    call.context = context
    out = torch.full_like(cell.dout, float("nan"))
    call.forward(out)

    def forward():
        _call.check(_call.lib.flash_attn_forward(context or _native.context, call.address, call._exec()))
        return [out]

    return forward, None


def peer(cell, backend):
    leaves = [t.detach().requires_grad_() for t in (cell.q, cell.k, cell.v)]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, dropout_p=cell.dropout, is_causal=cell.causal)
    dout = cell.dout.transpose(1, 2)

    def forward():
        with sdpa_kernel(backend), torch.no_grad():
            return [scaled_dot_product_attention(q, k, v, dropout_p=cell.dropout, is_causal=cell.causal).transpose(1, 2)]

    def backward():
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return forward, backward


def portable(cell):
    """Ours, by the kernels for any GPU. A context has one kernel's name: each pass has its own."""
    return tuple(ours(cell, kernel_context(name))[n] for n, name in enumerate(("forward_sm80", "backward_sm80")))


@functools.cache
def kernel_context(name):
    made = ctypes.c_void_p()
    _call.check(_call.lib.flash_attn_create(ctypes.byref(made), ctypes.byref(_native.Options(kernel=name.encode()))))
    return made.value


def packed_peer(cell, name):
    ops, window = torch.ops.aten, (-1, 0) if cell.causal else (-1, -1)
    leaves = [t.detach().requires_grad_() for t in (cell.q, cell.k, cell.v)]
    ends = (cell.cu, cell.cu, cell.seqlen, cell.seqlen)
    if name == "flash":
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(*leaves, *ends, window_size=window)

        def forward():
            with torch.no_grad():
                return [varlen_attn(*leaves, *ends, window_size=window)]

        return forward, lambda: torch.autograd.grad(out, leaves, cell.dout, retain_graph=True)
    found = ops._cudnn_attention_forward(cell.q, cell.k, cell.v, None, *ends, True, 0.0, cell.causal)

    def forward():
        return [ops._cudnn_attention_forward(cell.q, cell.k, cell.v, None, *ends, True, 0.0, cell.causal)[0]]

    def backward():
        return ops._cudnn_attention_backward(cell.dout, cell.q, cell.k, cell.v, found[0], found[1], found[6], found[7], None, *ends, 0.0, cell.causal)

    return forward, backward


def flex(cell):
    """FlexAttention, with a block mask when causal. Compiled for exactly this shape."""
    from torch._functorch import config
    from torch.nn.attention import flex_attention as module

    torch.compiler.reset()  # one shape's code at a time, or the compiler gives up after a few
    config.donated_buffer = False  # a compiled backward may else run once only
    compiled = torch.compile(module.flex_attention, dynamic=False)
    mask = None
    if cell.causal:
        mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, cell.seqlen, cell.seqlen, device=DEVICE)
    leaves = [t.detach().requires_grad_() for t in (cell.q, cell.k, cell.v)]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    dout = cell.dout.transpose(1, 2)
    kept, slopes, softcap = [], cell.slopes, cell.softcap

    def modified(score, b, h, i, j):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - slopes[h] * (i - j).abs()

    terms = {"block_mask": mask, "score_mod": modified if softcap or slopes is not None else None}

    def forward():
        with torch.no_grad():
            return [compiled(q.detach(), k.detach(), v.detach(), **terms).transpose(1, 2)]

    def backward():
        if not kept:
            kept.append(compiled(q, k, v, **terms))
        return torch.autograd.grad(kept[0], leaves, dout, retain_graph=True)

    return forward, backward


def milliseconds(run, launches):
    """Of the card: launches gather behind a kernel that spins for a millisecond, or the host's way to the first would be timed too."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)
    begin.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / launches


def time_by_turns(runs, groups):
    """Median milliseconds of each run; about 20 ms of launches a group."""
    launches = {name: max(1, min(50, int(20 / max(milliseconds(run, 2), 1e-3)))) for name, run in runs.items()}
    times, order = {name: [] for name in runs}, random.Random(0)
    for _ in range(groups):
        for name in order.sample(list(runs), len(runs)):  # or who comes behind a slow one has a cooler card, with higher clocks
            times[name].append(milliseconds(runs[name], launches[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def graph_of(run, error):
    """What replays the calls of `run`, or "WRONG ..."."""
    if error is not None:
        return f"WRONG {error:.1e}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.kept = run, kept
    return graph


class Decode:
    """Few queries on many keys. A pool of random numbers serves all cells; `sets` calls have keys of their own in it."""

    HEADS, HEADS_K, L2_BYTES, MOST_SETS = 32, 8, 512 << 20, 128
    PAGES = {"paged16": 16, "paged64": 64, "paged256": 256}

    def __init__(self, pool, d, queries, batch, keys):
        self.d, self.queries, self.batch, self.keys, self.pool = d, queries, batch, keys, pool
        elements = 2 * batch * keys * self.HEADS_K * d
        self.kv_bytes = 2 * elements
        self.sets = max(1, min(self.MOST_SETS, -(-self.L2_BYTES // self.kv_bytes), pool.numel() // elements))
        self.kv = [pool[n * elements : (n + 1) * elements].view(2, batch, keys, self.HEADS_K, d) for n in range(self.sets)]
        self.q = torch.randn(batch, queries, self.HEADS, d, device=DEVICE, dtype=torch.bfloat16)
        self.bytes = self.kv_bytes + 4 * self.q.numel()
        self.outs = {}

    def wrong(self, out, table=None, page=0):
        """The relative L2 error of the last entry of the last set, or None if all is well."""
        k, v = self.kv[-1]
        if table is not None:
            k, v = (t.view(-1, page, self.HEADS_K, self.d)[table[-1].long()].reshape(1, self.keys, self.HEADS_K, self.d) for t in (k, v))
        group, error, norm = self.HEADS // self.HEADS_K, 0.0, 0.0
        for head in range(self.HEADS_K):
            q = self.q[-1, :, head * group : (head + 1) * group].double()
            scores = torch.einsum("qhd,kd->hqk", q, k[-1, :, head].double()) * self.d**-0.5
            truth = torch.einsum("hqk,kd->qhd", torch.softmax(scores, -1), v[-1, :, head].double())
            error += (out[-1, :, head * group : (head + 1) * group].double() - truth).square().sum()
            norm += truth.square().sum()
        error = (error / norm).sqrt().item()
        return None if error <= 1e-2 else error

    def ours(self, page=0, parts=0, context=None):
        """(calls, error): the calls of all sets; they run once. parts: num_splits."""
        table, out = None, torch.full_like(self.q, float("nan"))
        if page:
            pages = self.batch * self.keys // page
            table = torch.randperm(pages, device=DEVICE).to(torch.int32).view(self.batch, -1)
        calls, size = [], ctypes.c_size_t()
        for k, v in self.kv:
            if page:
                k, v = (t.reshape(-1, page, self.HEADS_K, self.d) for t in (k, v))
            call = _call.Call(self.q, k, v, block_table=table, num_splits=parts)
            call.context = context
            call._set_results(out, None)
            calls.append(call)
        context = context or _native.context
        _call.check(_call.lib.flash_attn_workspace_size(context, calls[0].address, _native.FORWARD, ctypes.byref(size)))
        space = torch.empty(max(1, size.value), device=DEVICE, dtype=torch.uint8)  # without it the graph would hold allocations

        def run():
            for call in calls:
                call.exec.stream = torch.cuda.current_stream().cuda_stream
                call.exec.workspace, call.exec.workspace_bytes = space.data_ptr(), size.value
                _call.check(_call.lib.flash_attn_forward(context, call.address, call._exec()))

        run()
        return run, self.wrong(out, table, page)

    def fa3(self):
        def run():
            return [fa3.few_queries(self.q, k, v) for k, v in self.kv][-1]

        return run, self.wrong(run())

    def peer(self, backend):
        q, kv = self.q.transpose(1, 2), [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in self.kv]

        def run():
            with sdpa_kernel(backend), torch.no_grad():
                return [scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in kv][-1]

        return run, self.wrong(run().transpose(1, 2))

    def read(self):
        views = [kv.view(-1).view(torch.float32) for kv in self.kv]
        return lambda: [view.sum() for view in views], None

    def copy(self):
        half, n = self.pool[self.pool.numel() // 2 :], self.kv[0].numel() // 2
        pairs = [(half[at : at + n], kv[0].reshape(-1)) for at, kv in zip(range(0, half.numel() - n + 1, n), self.kv)]
        if len(pairs) < len(self.kv) or pairs[0][0].data_ptr() < self.kv[-1].data_ptr() + self.kv_bytes:
            raise MemoryError("no room for a copy")
        return lambda: [to.copy_(k) for to, k in pairs], None

    def run_of(self, name):
        own = {"ours": self.ours, "by batch": lambda: self.ours(parts=-1), "read": self.read, "copy": self.copy, "fa3": self.fa3}
        return own[name]() if name in own else self.ours(self.PAGES[name]) if name in self.PAGES else self.peer(PEERS[name])

    def graph(self, name):
        """What replays the calls of all sets, or "WRONG ..."."""
        return graph_of(*self.run_of(name))


def decode_row(cell, names, groups):
    """{name: GB/s, "WRONG ..." or None where it has no kernel}"""
    row, graphs = {}, {}
    for name in names:
        try:
            graphs[name] = cell.graph(name)
        except Exception as problem:  # no kernel or no memory
            row[name] = None
            if name not in ("flash", "cudnn", "fa3", "copy"):
                print(f"  {name}: {first_line(problem)}")
    row.update({name: graph for name, graph in graphs.items() if isinstance(graph, str)})
    runs = {name: graph.replay for name, graph in graphs.items() if not isinstance(graph, str)}
    for name, ms in time_by_turns(runs, groups).items():
        row[name] = (cell.kv_bytes if name in ("read", "copy") else cell.bytes) * cell.sets / ms / 1e6
    return row


def decode(options, seqlens, groups):
    """The table of --decode. Returns its rows."""
    pages = [name for name, size in Decode.PAGES.items() if options.pages in (0, size)]
    names = ["read", "copy", "ours", "by batch", *pages, "flash", "cudnn", *(["fa3"] if options.fa3 else [])]
    heads, rows = [d for d, _ in options.head_dims], []
    largest = 4 * max(seqlens) * max(map(int, options.batches.split(","))) * Decode.HEADS_K * max(heads)
    pool = torch.empty(max(largest, 1 << 29), device=DEVICE, dtype=torch.bfloat16).normal_()
    header = f"{'d':>3} {'q':>2} {'b':>2} {'keys':>6} | " + " ".join(f"{n:>8}" for n in names) + " |     us  /read /flash /cudnn" + ("   /fa3" if options.fa3 else "")
    print(header, "-" * len(header), sep="\n")
    for d, queries, batch, keys in itertools.product(heads, *(map(int, x.split(",")) for x in (options.queries, options.batches)), seqlens):
        cell = Decode(pool, d, queries, batch, keys)
        row = decode_row(cell, names, groups)
        speeds = {n: x for n, x in row.items() if isinstance(x, float)}
        over = [speeds["ours"] / speeds[n] if "ours" in speeds and n in speeds else None for n in ("read", *names[names.index("flash") :])]
        shown = [f"{x:8.0f}" if isinstance(x, float) else f"{x or '-':>8}" for x in map(row.get, names)]
        print(f"{d:3} {queries:2} {batch:2} {keys:6} | " + " ".join(shown) + f" | {cell.bytes / speeds.get('ours', 1e99) / 1e3:6.1f}  " +
              "  ".join(f"{x:5.2f}" if x else "    -" for x in over), flush=True)
        rows.append({"pass": "decode", "head_dim": d, "queries": queries, "batch": batch, "seqlen": keys, "gigabytes_per_second": row})
        del cell
    return rows


def first_line(problem):
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__


def runs_of(cell, names):
    """{name: (forward, backward), or None where it has no kernel}"""
    runs = {}
    for name in names:
        try:
            own = {"ours": ours, "flex": flex, "portable": portable, "fp8": fp8, "whole": whole, "fa3": fa3.peer}.get(name)
            runs[name] = own(cell) if own else packed_peer(cell, name) if cell.packed else peer(cell, PEERS[name])
        except Exception as problem:  # no kernel, no memory, or a compiler that gave up
            runs[name] = None
            if name in ("ours", "flex", "fa3"):
                print(f"  {name}: {first_line(problem)}")
    return runs


def bench_pass(cell, backward, runs, groups):
    """{name: TFLOP/s, "WRONG ..." or None where it has no kernel}"""
    right, row = {}, {}
    for name, pair in runs.items():
        row[name] = None
        if pair is None or pair[backward] is None:
            continue
        try:
            results = pair[backward]()
            checked = not cell.dropout or name in ("ours", "portable")
            error = cell.wrong(results, 1 if backward else 0, 5e-2 if name == "fp8" else 1e-2) if checked else None
        except Exception as problem:
            if name in ("ours", "flex", "fa3"):
                print(f"  {name}: {first_line(problem)}")
            continue
        if error is None:
            right[name] = pair[backward]
        else:
            row[name] = f"WRONG {error:.1e}"
    for name, ms in time_by_turns(right, groups).items():
        row[name] = cell.flops(backward) / ms / 1e9
    return row


def has_card():
    return torch.cuda.is_available()


def state_of_card():
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        return subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return torch.cuda.get_device_name()


def write_report(options, card, rows):
    if options.json:
        report = {"schema": "flashattn-gpu-bench-1", "card": card, "torch": torch.__version__, "rows": rows}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", help="64,128,256; with --decode 128,64")
    parser.add_argument("--seqlens", help="512,1024,2048,4096,8192,16384; with --decode, keys, 1024,4096,16384,131072")
    parser.add_argument("--passes", choices=["forward", "backward", "both"], default="both")
    parser.add_argument("--groups", type=int, default=7, help="timed groups of launches")
    parser.add_argument("--math", action="store_true", help="standard attention too, up to 2048 keys")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; needs Triton, and seconds a shape to compile")
    parser.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3 too, by the operators of this library: see fa3.py")
    parser.add_argument("--varlen", action="store_true", help="packed sequences of random lengths up to the one given")
    parser.add_argument("--deterministic", action="store_true", help="sums of the backward in a fixed order")
    parser.add_argument("--portable", action="store_true", help="our kernels for any GPU too")
    parser.add_argument("--fp8", action="store_true", help="our forward with FP8 inputs too")
    parser.add_argument("--softcap", type=float, default=0.0, help="scores become X tanh(score / X)")
    parser.add_argument("--alibi", action="store_true", help="ALiBi, slopes of 2^-8/h to 2^-8")
    parser.add_argument("--pages", type=int, default=0, help="our keys in pages of so many; the forward alone")
    parser.add_argument("--dropout", type=float, default=0.0, help="pairs are dropped with this probability")
    parser.add_argument("--decode", action="store_true", help="few queries on many keys, in GB/s")
    parser.add_argument("--queries", default="1,4,16", help="--decode: queries of a sequence")
    parser.add_argument("--batches", default="1,8,64", help="--decode: sequences")
    parser.add_argument("--quick", action="store_true", help="three lengths, three groups")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    own_options = options.softcap or options.alibi or options.pages or options.dropout
    if own_options and (options.varlen or options.fp8 or (options.decode and own_options != options.pages)):
        parser.error("--softcap, --alibi, --pages and --dropout are for plain calls: leave out --varlen, --fp8 and, but for --pages, --decode")
    if not 0 <= options.dropout < 1 or (options.dropout and (options.flex or options.fa3)):
        parser.error("--dropout is at least 0 and less than 1; --flex and --fa3 have none")
    if not has_card():
        print("skipped: no CUDA device")
        return 0
    try:
        options.head_dims = [head_dims.widths(d) for d in (options.head_dims or ("128,64" if options.decode else "64,128,256")).split(",")]
    except ValueError:
        parser.error(f"--head-dims {options.head_dims}: expected numbers, or pairs such as 192:128, between commas")
    if options.decode and any(d != d_v for d, d_v in options.head_dims):
        parser.error("--decode has one head_dim for Q, K and V")
    lengths = options.seqlens or ("1024,4096,16384,131072" if options.decode else "512,1024,2048,4096,8192,16384")
    seqlens = [512, 2048, 8192] if options.quick else [int(s) for s in lengths.split(",")]
    groups = 3 if options.quick else options.groups
    if options.softcap < 0 or options.pages < 0 or (options.pages and any(seqlen % options.pages for seqlen in seqlens)):
        parser.error("--softcap and --pages are at least 0, and every length is whole pages")
    if options.fa3:
        fa3.load(options.fa3)
    torch.manual_seed(0)
    card = state_of_card()
    print(f"before: {card}; PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    if options.decode:
        rows = decode(options, seqlens, groups)
        print(f"after: {state_of_card()}")
        write_report(options, card, rows)
        return int(any(isinstance(x, str) for row in rows for x in row["gigabytes_per_second"].values()))
    several = ["efficient"] if not options.varlen and not options.fp8 else []
    own_terms = options.softcap > 0 or options.alibi
    if options.pages:
        options.passes = "forward"
    names = ["ours", *(["fp8"] if options.fp8 else []), *(["whole"] if options.pages else []), *(["portable"] if options.portable else []), *(["math"] if options.math else []), *several,
             *(["flex"] if options.flex else []), "flash", "cudnn",
             *(["fa3"] if options.fa3 else [])]
    if own_terms:
        names = [n for n in names if n in ("ours", "whole", "portable", "flex")]
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would be timed
    header = f"{'pass':8} {'d':>7} {'causal':6} {'s':>5} | " + " ".join(f"{n:>9}" for n in names) + " | /flash  /best"
    print(header, "-" * len(header), sep="\n")
    rows, ratios, wrong = [], [], 0
    for d, d_v in options.head_dims:
        for causal in (False, True):
            for seqlen in seqlens:
                cell = Cell(d, seqlen, causal, options, d_v)
                runs = runs_of(cell, [n for n in names if n != "math" or seqlen <= 2048])
                for backward in {"forward": [False], "backward": [True], "both": [False, True]}[options.passes]:
                    row = bench_pass(cell, backward, runs, groups)
                    speeds = {n: x for n, x in row.items() if isinstance(x, float)}
                    best = max((x for n, x in speeds.items() if n not in ("ours", "portable", "fp8", "whole")), default=None)
                    over = [speeds["ours"] / x if "ours" in speeds and x else None for x in (speeds.get("flash"), best)]
                    if over[0]:
                        ratios.append(over[0])
                    wrong += sum(isinstance(x, str) for x in row.values())
                    shown = [f"{x:9.1f}" if isinstance(x, float) else f"{x or '-':>9}" for x in (row.get(n) for n in names)]
                    print(f"{'backward' if backward else 'forward':8} {head_dims.title((d, d_v)):>7} {str(causal):6} {seqlen:5} | " + " ".join(shown) +
                          " | " + "  ".join(f"{x:5.2f}" if x else "    -" for x in over), flush=True)
                    rows.append({"pass": "backward" if backward else "forward", "head_dim": d, "head_dim_v": d_v, "causal": causal, "seqlen": seqlen,
                                 "varlen": options.varlen, "deterministic": options.deterministic, "softcap": options.softcap, "alibi": options.alibi,
                                 "pages": options.pages, "dropout": options.dropout, "tflops": row})
                    write_report(options, card, rows)
                del cell, runs
    print(f"after: {state_of_card()}")
    over = f"ours over flash: geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}, {len(ratios)} cells; " if ratios else ""
    print(f"{over}{wrong} wrong answers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
