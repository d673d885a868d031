#!/usr/bin/env python3
"""Time multi-head latent attention (MLA) on the CPU by turns with PyTorch: head_dim 576, V the first 512 columns of K, all query heads on one key head.

    make && python3 bench/mla_cpu.py [--dtypes bfloat16] [--heads 4,16,128] [--queries 1] [--seqlens 32768] [--threads 1] [--tier auto] [--no-torch]

Batch 1, no mask. PyTorch runs the faster of two: `math` with V as it is, and `flash`, which wants equal head dims, with all of K as V, of whose result 512
columns are kept. For both the heads are folded into rows of one query head: spread over K (stride 0, or enable_gqa) they are many times slower. Each answer is compared with float64 first, as compare_torch.py does; a wrong one makes the exit status 1. GFLOP/s
count 2 (576 + 512) for each pair of a query head and a key, GB/s count K once; percentages are of the multiply-adds and the read that
`flashattn info --measure` sees between the cells. The least of all turns counts.
"""

import argparse
import itertools
import sys

from compare_torch import ROOT, TIERS, Cell, Ours, Peaks, Torch, peak_of, sdpa, take_turns, torch

D, DV = 576, 512


class Latent(Cell):
    """One problem, as compare_torch.py's; its scale is 1 / sqrt(576)."""

    def __init__(self, dtype, heads, queries, keys):
        super().__init__(dtype, D, queries, keys, heads, 1, False, False)

    def _find_truth(self):
        self.v = self.k[..., :DV]
        super()._find_truth()

    def work(self):
        return 2 * (D + DV) * self.heads * self.seqlen_q * self.seqlen_k, self.k.numel() * self.k.element_size()


class Folded(Torch):
    """`kind`: flash or math."""

    def _forward(self):
        q, k, v = self.leaves
        return sdpa(q.view(1, 1, -1, D), k, k if self.kind == "flash" else v)[..., :DV].view(*q.shape[:3], DV)


def run(cell, options, peaks):
    """Prints the cell's line; False if ours is wrong."""
    flops, k_bytes = cell.work()
    runs = {"ours": Ours(cell, options.threads, options.tier)}
    if not options.no_torch:
        runs |= {kind: Folded(cell, kind) for kind in ("flash", "math")}
    problems = {name: one.wrong() for name, one in runs.items()}
    peaks.measure(options.threads, k_bytes)
    times = take_turns(runs, options.seconds, 5)
    peaks.measure(options.threads, k_bytes)
    best, limits = {name: min(t[0] for t in turns) for name, turns in times.items()}, peaks.of(options.threads, k_bytes)
    ours, kernel = best["ours"], runs["ours"].kernels[0]
    shares = [100 * rate / limit if limit else 0 for rate, limit in ((flops / ours / 1e9, limits[peak_of(kernel)]), (k_bytes / ours / 1e9, limits["read_gbps"]))]
    line = (f"{cell.dtype:8} {cell.heads:5} {cell.seqlen_q:2} {cell.seqlen_k:6} | {1e3 * ours:9.3f} ms {flops / ours / 1e9:6.0f} GFLOP/s {shares[0]:3.0f}% "
            f"{k_bytes / ours / 1e9:5.1f} GB/s {shares[1]:3.0f}% | ")
    for seconds, kind in sorted((best[kind], kind) for kind in best if kind != "ours")[:1]:
        line += f"{1e3 * seconds:9.3f} ms {seconds / ours:6.2f} {kind:5} | "
    print(line + f"{kernel}, errors " + " ".join(f"{one.errors[0]:.0e}" for one in runs.values()), flush=True)
    runs["ours"].close()
    for name, problem in problems.items():
        if problem:
            print(f"  WRONG: {name}: {problem}")
    return not problems["ours"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dtypes", "bfloat16,float16,float32"), ("heads", "1,4,16,32,64,128"), ("queries", "1"), ("seqlens", "32768")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tier", choices=TIERS, default="auto", help="the highest of ours")
    parser.add_argument("--seconds", type=float, default=2.0, help="to time each cell for, all together")
    parser.add_argument("--no-torch", action="store_true", help="ours alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    peaks, right = Peaks(str(ROOT / "build" / "cli" / "flashattn")), True
    print(f"PyTorch {torch.__version__}, {options.threads} threads\n{'dtype':8} heads  q   keys | ours: of the peak, of a read | PyTorch, times")
    for dtype, *shape in itertools.product(options.dtypes.split(","), *([int(x) for x in text.split(",")] for text in (options.heads, options.queries, options.seqlens))):
        right &= run(Latent(dtype, *shape), options, peaks)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
