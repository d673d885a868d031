#!/usr/bin/env python3
"""Time flashattn and PyTorch's attention on the CPU by turns, on the same inputs, and check every answer.

    make && python3 bench/compare_torch.py [--quick] [--threads 1,2] [--rounds N] [--json FILE [--append]]

Training: batch 1, 512 / d heads, no mask and causal, forward and backward; --head-dims 192:128 gives V a head_dim of
its own. GFLOP/s count 4 s^2 d h, half of it when causal, 2.5 times for the backward. Inference, only where asked
for: the forward without gradients, ours without LSE. Decode: one query of 32 heads on 8 key heads. PyTorch runs
whichever of its CPU backends is fastest in the cell. Tensors are PyTorch's own [b, h, s, d], random normal, never
zeros. Where the tier is amx, float32 is also timed with AMX off, and float16 on the tier amx-fp16 where the processor has AMX-FP16 but a hypervisor hides it; PyTorch then does not see it.

Before anything is timed each result is compared with float64: output and LSE of one whole head, and the gradients of
some queries and keys. Ours start as NaN and must be within the tests' tolerances (a relative L2 error of 5e-6, 1e-3
or 5e-3 for float32, float16, bfloat16, twice that for gradients), or the exit status is 1. PyTorch's error is printed
beside ours.

Percentages are of the best multiply-adds, AMX or AVX512_BF16 products (%BF16) and memory reads that `flashattn info
--measure` saw between the cells of this run. A long grid may be run in pieces: --append keeps what FILE has of other cells. On a machine that
others share, where each is fast in its own minutes, --rounds goes through the grid several times: fastest and median
are then of all turns that a side has had.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
if (ROOT / "build" / "libflashattn.so").exists():  # else the installed package
    os.environ.setdefault("FLASHATTN_LIBRARY", str(ROOT / "build" / "libflashattn.so"))
    sys.path.insert(0, str(ROOT / "python"))

import head_dims  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

from flashattn import _native  # noqa: E402
from flashattn._call import Call  # noqa: E402

SCHEMA = "flashattn-torch-bench-1"
TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 5e-3}
PEER_SLACK = 4  # PyTorch adds gradients up in the inputs' type; it must be the same computation, no more
TIERS = {"auto": 0, "scalar": 1, "neon": 2, "avx2": 3, "avx512": 4, "avx512-bf16": 8, "amx": 5, "amx-fp16": 6, "neon-bf16": 7}
MATH_BYTES = 1 << 30  # standard attention is a candidate while its matrices fit in this
SAMPLES = 16  # queries and keys whose gradients are checked
DECODE = {"heads": 32, "heads_k": 8, "head_dims": [(128, 128)], "seqlen": 32768}


# ---- one problem ----


class Cell:
    """Inputs [1, heads, s, d], V d_v, in PyTorch's layout; `truth` is what head `head` must hold."""

    def __init__(self, dtype, d, seqlen_q, seqlen_k, heads, heads_k, causal, backward, want_lse=True, d_v=None):
        d_v = d_v or d
        self.dtype, self.d, self.d_v, self.seqlen_q, self.seqlen_k, self.causal = dtype, d, d_v, seqlen_q, seqlen_k, causal
        self.heads, self.heads_k, self.backward, self.head = heads, heads_k, backward, heads - 1
        self.want_lse = want_lse
        kind = getattr(torch, dtype)
        self.q, self.dout = (torch.randn(1, heads, seqlen_q, n).to(kind) for n in (d, d_v))
        self.k, self.v = (torch.randn(1, heads_k, seqlen_k, n).to(kind) for n in (d, d_v))
        self.rows = torch.linspace(0, seqlen_q - 1, SAMPLES).long()
        self.keys = torch.linspace(0, seqlen_k - 1, SAMPLES).long()
        self._find_truth()

    def _probabilities(self, q, k, first, lse=None):
        scores = q @ k.T * self.d**-0.5
        if self.causal:
            visible = torch.arange(self.seqlen_k) <= (first + self.seqlen_k - self.seqlen_q).unsqueeze(1)
            scores.masked_fill_(~visible, float("-inf"))
        lse = torch.logsumexp(scores, 1) if lse is None else lse
        return scores.sub_(lse.unsqueeze(1)).exp_(), lse

    def _find_truth(self):
        q, dout = self.q[0, self.head].double(), self.dout[0, self.head].double()
        k, v = (t[0, self.head * self.heads_k // self.heads].double() for t in (self.k, self.v))
        outs, lses, columns = [], [], []
        for rows in torch.arange(self.seqlen_q).split(512):  # S and P of all rows at once would be gigabytes
            p, lse = self._probabilities(q[rows], k, rows)
            outs.append(p @ v)
            lses.append(lse)
            columns.append(p[:, self.keys])
        out, self.lse, columns = torch.cat(outs), torch.cat(lses), torch.cat(columns)
        self.truth = [out]
        if self.backward:
            scale, delta = self.d**-0.5, (dout * out).sum(1, keepdim=True)
            p, _ = self._probabilities(q[self.rows], k, self.rows, self.lse[self.rows])
            dq = p * (dout[self.rows] @ v.T - delta[self.rows]) @ k * scale
            ds = columns * (dout @ v[self.keys].T - delta)
            self.truth += [dq, ds.T @ q * scale, columns.T @ dout]

    def errors(self, results):
        """Relative L2 errors of out, or of out, dq, dk, dv, each [1, heads, s, d]. NaN stays NaN."""
        parts = [slice(None), self.rows, self.keys, self.keys]
        found = []
        for got, expected, part in zip(results, self.truth, parts):
            ours = got[0, self.head].double()[part]
            found.append(((ours - expected).norm() / expected.norm()).item())
        return found

    def wrong(self, errors, slack=1):
        """What is not within the tolerances, as a sentence; None: all is well."""
        limits = [TOLERANCE[self.dtype] * slack * (2 if n else 1) for n in range(len(errors))]
        bad = [
            f"{name} {error:.1e}"
            for name, error, limit in zip(("out", "dq", "dk", "dv"), errors, limits)
            if not error <= limit
        ]
        return ", ".join(bad) or None

    def wrong_lse(self, lse):
        error = ((lse[0, self.head].double() - self.lse).abs() / self.lse.abs().clamp(min=1)).max().item()
        return None if error <= 5e-6 else f"lse {error:.1e}"

    def work(self):
        """Operations of the forward, and bytes of K and V."""
        pairs = self.seqlen_q * self.seqlen_k / (2 if self.causal else 1)
        return 2 * pairs * (self.d + self.d_v) * self.heads, (self.k.numel() + self.v.numel()) * self.k.element_size()


# ---- who runs it: step() runs once and returns (seconds of the forward, seconds of the backward) ----


def context_of(threads, tier):
    context = ctypes.c_void_p()
    options = _native.Options(num_threads=threads, max_isa=TIERS[tier], use_openmp=True)
    before = os.environ.get("FLASH_ATTN_ASSUME")
    if tier == "amx-fp16":
        os.environ["FLASH_ATTN_ASSUME"] = tier
    _native.check(_native.lib.flash_attn_create(ctypes.byref(context), ctypes.byref(options)))
    if before is None:
        os.environ.pop("FLASH_ATTN_ASSUME", None)
    return context


def hides_amx_fp16():
    """True if the processor has AMX-FP16 and does not say so."""
    info, context = _native.DeviceInfo(), context_of(1, "amx-fp16")
    _native.check(_native.lib.flash_attn_get_device_info(context, _native.Device(), ctypes.byref(info)))
    _native.lib.flash_attn_destroy(context)
    return b"amx-fp16:assumed" in info.features


class Ours:
    def __init__(self, cell, threads, tier):
        self.cell = cell
        self.context = context_of(threads, tier)
        q, k, v, self.dout = (t.transpose(1, 2) for t in (cell.q, cell.k, cell.v, cell.dout))
        self.call = Call(q, k, v, causal=cell.causal)
        self.call.context = self.context
        self.results = [torch.full_like(t, float("nan")) for t in (cell.dout, cell.q, cell.k, cell.v)]
        self.lse = torch.full((1, cell.heads, cell.seqlen_q), float("nan"))
        self.views = [t.transpose(1, 2) for t in self.results]
        self.call._set_results(self.views[0], self.lse if cell.want_lse else None)
        self.kernels = [
            self._kernel(one) for one in ((_native.FORWARD, _native.BACKWARD) if cell.backward else (_native.FORWARD,))
        ]

    def _kernel(self, which):
        about = _native.Explanation()
        explain = _native.lib.flash_attn_explain
        _native.check(explain(self.context, self.call.address, which, ctypes.byref(about)))
        return about.kernel.decode()

    def step(self):
        start = time.perf_counter()
        _native.check(_native.lib.flash_attn_forward(self.context, self.call.address, None))
        middle = time.perf_counter()
        if self.cell.backward:
            self.call.backward(self.dout, self.views[0], self.lse, *self.views[1:])
        return middle - start, time.perf_counter() - middle

    def wrong(self):
        self.step()
        self.errors = self.cell.errors(self.results if self.cell.backward else self.results[:1])
        return self.cell.wrong(self.errors) or (self.cell.want_lse and self.cell.wrong_lse(self.lse))

    def close(self):
        _native.lib.flash_attn_destroy(self.context)


class Torch:
    """`kind`: a backend; for decode also whether the group's heads are folded into rows of the query."""

    def __init__(self, cell, kind):
        self.cell, self.kind = cell, kind
        self.leaves = [t.detach().requires_grad_(cell.backward) for t in (cell.q, cell.k, cell.v)]
        self.backend = SDPBackend.MATH if kind == "math" else SDPBackend.FLASH_ATTENTION
        self.results = None

    def _forward(self):
        q, k, v = self.leaves
        if self.kind == "flash, folded":
            return sdpa(q.view(1, self.cell.heads_k, -1, self.cell.d), k, v).view(q.shape)
        return sdpa(q, k, v, is_causal=self.cell.causal, enable_gqa=self.cell.heads != self.cell.heads_k)

    def step(self):
        with sdpa_kernel(self.backend):
            start = time.perf_counter()
            out = self._forward()
            middle = time.perf_counter()
            self.results = [out.detach()]
            if self.cell.backward:
                self.results += torch.autograd.grad(out, self.leaves, self.cell.dout)
            return middle - start, time.perf_counter() - middle

    def wrong(self):
        self.step()
        self.errors = self.cell.errors(self.results)
        return self.cell.wrong(self.errors, PEER_SLACK)


def fastest_step(run):
    times, begin = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < 0.2:
        times.append(sum(run.step()))
    return min(times)


def peer(cell):
    """PyTorch by the backend that is fastest here."""
    scores_bytes = 4 * cell.heads * cell.seqlen_q * cell.seqlen_k
    kinds = ["flash"] + (["math"] if scores_bytes <= MATH_BYTES else [])
    if cell.heads != cell.heads_k and not cell.causal:
        kinds.append("flash, folded")
    candidates = []
    for kind in kinds:
        one = Torch(cell, kind)
        try:
            problem = one.wrong()
        except RuntimeError as refused:
            problem = str(refused).split("\n")[0]
        if problem:
            print(f"  PyTorch, {kind}: {problem}")
        else:
            candidates.append((fastest_step(one) if len(kinds) > 1 else 0, one))
    return min(candidates, key=lambda c: c[0])[1] if candidates else None


# ---- times ----


# Whether both sides run on one team of threads. Else the other's may still spin, and each turn waits until they sleep;
# what sleeps is often woken on the processor of who wakes it, and waits there for a tick of a millisecond or more (0052).
ONE_TEAM = hasattr(ctypes.CDLL(None), "GOMP_parallel")


def take_turns(runs, seconds, least):
    """{name: [(forward, backward), ...]}: a turn each until the time is up, at least `least` turns."""
    times = {name: [] for name in runs}
    begin, turns = time.perf_counter(), 0
    while turns < least or (turns < 500 and time.perf_counter() - begin < seconds):
        for name, run in runs.items():
            if not ONE_TEAM:
                time.sleep(0.005)
            times[name].append(run.step())
        turns += 1
    return times


class Peaks:
    """The best that `flashattn info --measure` has seen at each number of threads; reads by their bytes too."""

    def __init__(self, command):
        self.command = command if pathlib.Path(command).exists() else None
        self.best = {}
        if not self.command:
            print(f"{command} is not there: no percentages")

    def measure(self, threads, read_bytes):
        if self.command:
            done = subprocess.run(
                [self.command, "info", "--measure", "--json", "--threads", str(threads), "--read-bytes", str(max(read_bytes, 1 << 20))],
                capture_output=True,
                text=True,
                check=True,
            )
            found, kept = json.loads(done.stdout)["peaks"], self.best.setdefault(threads, {})
            for name, value in (
                ("fma_gflops", found["fma_gflops"]),
                ("amx_gflops", found["amx_gflops"]),
                ("bf16_gflops", found["bf16_gflops"]),
                (read_bytes, found["read_gbps"]),
            ):
                kept[name] = max(kept.get(name, 0), value)

    def of(self, threads, read_bytes):
        kept = self.best.get(threads, {})
        best = {name: kept.get(name, 0) for name in ("fma_gflops", "amx_gflops", "bf16_gflops")}
        return {**best, "read_gbps": kept.get(read_bytes, 0)}


def summary(seconds, error):
    return {"min_ms": 1e3 * min(seconds), "median_ms": 1e3 * statistics.median(seconds), "error": error}


def rows_of(cell, threads, name, runs, times):
    """A row of the report for each pass."""
    mine, theirs = runs[name], runs.get("torch")
    flops, kv_bytes = cell.work()
    more = head_dims.backward_share((cell.d, cell.d_v))
    passes = (
        [("forward", 0, 1), ("backward", 1, more), ("forward+backward", 2, 1 + more)]
        if cell.backward
        else [("decode" if cell.want_lse else "inference", 0, 1)]
    )
    for label, part, factor in passes:

        def side(who):
            seconds = [t[part] if part < 2 else sum(t) for t in times[who]]
            errors = runs[who].errors
            return summary(seconds, errors[0] if part == 0 else max(errors[1:]) if part == 1 else max(errors))

        row = {
            "pass": label,
            "dtype": cell.dtype,
            "head_dim": cell.d,
            "head_dim_v": cell.d_v,
            "heads": cell.heads,
            "heads_k": cell.heads_k,
            "seqlen_q": cell.seqlen_q,
            "seqlen_k": cell.seqlen_k,
            "causal": cell.causal,
            "threads": threads,
            "tier": name,
            "kernel": ", ".join(mine.kernels if part == 2 else mine.kernels[part : part + 1]),
            "flops": flops * factor,
            "kv_bytes": kv_bytes,
            "turns": len(times[name]),
            "ours": side(name),
            "torch": {"backend": theirs.kind, **side("torch")} if theirs else None,
        }
        for value in ("min_ms", "median_ms"):
            row[f"ratio_{value[:-3]}"] = row["torch"][value] / row["ours"][value] if theirs else None
        yield row


# ---- the table ----


def header(tier):
    """tier: the machine's highest."""
    bf16 = "%BF16" if tier == "avx512-bf16" else "%AMX"
    return (
        f"{'pass':16} {'dtype':8} {'d':>7} {'mask':6} {'s':>5} {'thr':>3} {'tier':6} | {'ms':>9} {'median':>9} "
        f"{'GFLOP/s':>8} {'%FMA':>5} {bf16:>5} | {'PyTorch':>9} {'median':>9} {'GFLOP/s':>8} | {'ratio':>6} {'median':>6} | errors"
    )


def peak_of(kernel):
    """The peak of what a kernel multiplies with."""
    return "amx_gflops" if "amx" in kernel else "bf16_gflops" if "avx512-bf16" in kernel else "fma_gflops"


def show(row, peaks):
    def speed(side):
        return row["flops"] / row[side]["min_ms"] / 1e6

    if row["pass"] == "decode":
        gbps = row["kv_bytes"] / row["ours"]["min_ms"] / 1e6
        share = f"{gbps:5.1f} GB/s" + (
            f", {100 * gbps / peaks['read_gbps']:3.0f}% of a read" if peaks["read_gbps"] else ""
        )
        rate = f"{share:>24}"
    else:
        ours = speed("ours")
        own = peak_of(row["kernel"])
        shown = [
            peaks["fma_gflops"] if row["dtype"] == "float32" or own == "fma_gflops" else 0,
            peaks[own] if own != "fma_gflops" else 0,
        ]
        percents = [f"{100 * ours / peak:5.1f}" if peak else f"{'-':>5}" for peak in shown]
        rate = f"{ours:8.0f} {' '.join(percents)}"
    dims = head_dims.title(head_dims.of_row(row))
    line = (
        f"{row['pass']:16} {row['dtype']:8} {dims:>7} {'causal' if row['causal'] else 'full':6} {row['seqlen_k']:5} "
        f"{row['threads']:3} {row['tier']:6} | {row['ours']['min_ms']:9.3f} {row['ours']['median_ms']:9.3f} {rate} | "
    )
    if row["torch"]:
        line += (
            f"{row['torch']['min_ms']:9.3f} {row['torch']['median_ms']:9.3f} {speed('torch'):8.0f} | {row['ratio_min']:6.2f} "
            f"{row['ratio_median']:6.2f} | {row['ours']['error']:.0e} {row['torch']['error']:.0e} {row['torch']['backend']}"
        )
    print(line, flush=True)


def geometric(rows):
    """Ratios by pass, dtype, threads and tier; and what causal saves."""
    groups = {}
    for row in rows:
        if row["torch"]:
            groups.setdefault((row["pass"], row["dtype"], row["threads"], row["tier"]), []).append(row["ratio_min"])
    for (label, dtype, threads, tier), ratios in groups.items():
        print(
            f"{label:16} {dtype:8} {threads:2} threads, tier {tier:6}: {statistics.geometric_mean(ratios):5.2f} times "
            f"PyTorch ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} cells)"
        )
    place = {identity(row): row for row in rows}
    gains = {}
    for row in rows:
        full = place.get(identity({**row, "causal": False}))
        if row["causal"] and full and row["pass"] in ("forward", "backward") and row["seqlen_k"] >= 4096:
            gains.setdefault((row["pass"], row["dtype"], row["tier"]), []).append(
                full["ours"]["min_ms"] / row["ours"]["min_ms"]
            )
    for (label, dtype, tier), found in gains.items():
        print(
            f"{label:16} {dtype:8} tier {tier:6}: causal is {min(found):.2f} to {max(found):.2f} times as fast as no mask from 4096 keys on"
        )


# ---- the run ----


def run_cell(report, options, make, tiers, threads_list):
    """One problem at every number of threads."""
    torch.set_num_threads(max(threads_list))
    cell = make()
    for threads in threads_list:
        torch.set_num_threads(threads)
        report.peaks.measure(threads, cell.work()[1])
        theirs = None if options.no_torch else peer(cell)
        runs = {"torch": theirs} if theirs else {}
        for tier in tiers:
            runs[tier] = Ours(cell, threads, tier)
            wrong = runs[tier].wrong()
            if wrong:
                print(
                    f"WRONG: ours, tier {tier}, {cell.dtype} d={head_dims.title((cell.d, cell.d_v))} s={cell.seqlen_k} causal={cell.causal}: {wrong}"
                )
                report.wrong += 1
                runs.pop(tier).close()
        times = take_turns(runs, options.seconds, options.turns)
        report.peaks.measure(threads, cell.work()[1])
        for tier in [t for t in tiers if t in runs]:
            for row in rows_of(cell, threads, tier, runs, report.with_earlier(cell, threads, tier, times)):
                show(row, report.peaks.of(threads, row["kv_bytes"]))
                report.rows[identity(row)] = row
            runs[tier].close()
        report.write()


class Report:
    def __init__(self, peaks):
        self.peaks, self.rows, self.turns, self.wrong = peaks, {}, {}, 0
        self.path = None

    def with_earlier(self, cell, threads, tier, times):
        """The turns of `tier` and PyTorch in this cell, those of earlier rounds too."""
        kept = self.turns.setdefault((cell.dtype, *cell.q.shape, *cell.k.shape, cell.d_v, cell.causal, cell.backward, threads, tier), {})
        for name in {tier, "torch"} & set(times):
            kept.setdefault(name, []).extend(times[name])
        return kept

    def keep(self, path, append, about):
        """From now on write() writes to path, after the rows of other cells that it has if `append`."""
        self.path, self.about, self.old = path, about, []
        if append and path.exists():
            old = json.loads(path.read_text())
            if (old["schema"], old["cpu"]["name"], old["torch"]) != (SCHEMA, about["cpu"]["name"], about["torch"]):
                sys.exit(f"{path} is of another machine, PyTorch or version of this script: nothing was appended")
            self.old = old["rows"]

    def write(self):
        """After each cell, so that a run which is cut short leaves what it has."""
        if self.path:
            rows = [{**row, "peaks": self.peaks.of(row["threads"], row["kv_bytes"])} for row in self.rows.values()]
            mine = {identity(row) for row in rows}
            rows = [row for row in self.old if identity(row) not in mine] + rows
            self.path.write_text(json.dumps({"schema": SCHEMA, **self.about, "rows": rows}, indent=1) + "\n")


def identity(row):
    return head_dims.of_row(row), *(
        row[name]
        for name in (
            "pass",
            "dtype",
            "heads",
            "heads_k",
            "seqlen_q",
            "seqlen_k",
            "causal",
            "threads",
            "tier",
        )
    )


def listed(kind=str):
    def parse(text):
        return [kind(word) for word in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}"  # argparse says it
    return parse


def arguments():
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    parser.add_argument(
        "--threads",
        type=listed(int),
        default=[t for t in (1, 2, 16) if t <= cores],
        help="default: 1,2,16, as far as there are cores",
    )
    parser.add_argument("--dtypes", type=listed(), default=list(TOLERANCE))
    parser.add_argument("--head-dims", type=listed(head_dims.widths), default=[(64, 64), (128, 128)])
    parser.add_argument("--seqlens", type=listed(int), default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--masks", type=listed(), default=["full", "causal"])
    parser.add_argument("--heads", type=int, help="default: 512 / d")
    parser.add_argument("--only", choices=("training", "inference", "decode"))
    parser.add_argument("--decode-seqlen", type=int, default=DECODE["seqlen"], help="keys of the decode cells")
    parser.add_argument("--decode-head-dims", type=listed(head_dims.widths), default=DECODE["head_dims"], help="of the decode cells")
    parser.add_argument("--tiers", type=listed(), help="tiers of ours, some of " + ",".join(TIERS))
    parser.add_argument("--no-torch", action="store_true", help="ours alone")
    parser.add_argument("--seconds", type=float, default=2.0, help="to time each cell for, all together")
    parser.add_argument("--turns", type=int, default=3, help="the least turns of each side")
    parser.add_argument("--rounds", type=int, default=1, help="how often to go through the grid")
    parser.add_argument(
        "--quick", action="store_true", help="float32 and bfloat16, 1024 and 4096, half a second a cell"
    )
    parser.add_argument(
        "--command", default=str(ROOT / "build" / "cli" / "flashattn"), help="the flashattn that measures the peaks"
    )
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--append", action="store_true", help="keep FILE's other rows")
    options = parser.parse_args()
    if options.quick:
        options.dtypes, options.seqlens, options.seconds = ["float32", "bfloat16"], [1024, 4096], 0.5
    for word, known in [
        *((d, TOLERANCE) for d in options.dtypes),
        *((t, TIERS) for t in options.tiers or []),
        *((m, ("full", "causal")) for m in options.masks),
    ]:
        if word not in known:
            parser.error(f"'{word}' is none of {', '.join(known)}")
    return options


def go_through_grid(report, options, more):
    """`more`: tiers to time beside the one that a dtype takes by itself."""
    inference = options.only == "inference"
    for dtype in options.dtypes:
        tiers = options.tiers or ["auto", *more.get(dtype, [])]
        for d, d_v in options.head_dims if options.only != "decode" else []:
            heads = options.heads or max(1, 512 // d)
            for mask in options.masks:
                for s in options.seqlens:
                    run_cell(
                        report,
                        options,
                        lambda: Cell(dtype, d, s, s, heads, heads, mask == "causal", not inference, not inference, d_v),
                        tiers,
                        options.threads,
                    )
        if options.only not in ("training", "inference"):
            for d, d_v in options.decode_head_dims:
                shape = (d, 1, options.decode_seqlen, DECODE["heads"], DECODE["heads_k"], False, False, True, d_v)
                run_cell(report, options, lambda: Cell(dtype, *shape), tiers if dtype == "float16" else ["auto"], options.threads)


def begin(cpu, options, append=False):
    """The report that cells go to, behind a line that says what machine this is and the table's head."""
    torch.manual_seed(0)
    about = {
        "cpu": {name: cpu[name] for name in ("name", "isa", "features", "num_cores")},
        "torch": torch.__version__,
        "flashattn": _native.version,
    }
    print(
        f"flashattn {_native.version} and PyTorch {torch.__version__} on {cpu['name']}, tier {cpu['isa']}, {cpu['num_cores']} cores"
    )
    columns = header(cpu["isa"])
    print(columns, "-" * len(columns), sep="\n")
    report = Report(Peaks(options.command))
    if options.json:
        report.keep(options.json, append, about)
    return report


def main():
    options = arguments()
    cpu = _native.device_info()
    more = {"float32": ["avx512"]} if cpu["isa"].startswith("amx") else {}
    if cpu["isa"] == "amx" and hides_amx_fp16():
        more["float16"] = ["amx-fp16"]
    report = begin(cpu, options, options.append)
    for _ in range(options.rounds):
        go_through_grid(report, options, more)
    print()
    geometric(list(report.rows.values()))
    report.write()
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
