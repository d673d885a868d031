#!/usr/bin/env python3
"""Time the attention of well-known models on the CPU, ours and PyTorch's fastest by turns, and check every answer.

    make && python3 bench/models_cpu.py [--models vit,bert] [--threads 1,2] [--dtypes bfloat16,float32] [--seconds 0.5] [--most 40] [--json FILE]

One sequence of each shape in model_shapes.py that has no window and no more than --most GFLOP forward. --models takes those whose names begin so. Cells, answers,
times and peaks are compare_torch.py's: the fastest of each side's turns, forward, backward and both; of grouped heads the forward alone, without LSE.
"""

import argparse
import pathlib
import statistics
import sys

import compare_torch  # first: it finds the library
import head_dims
from compare_torch import TOLERANCE, Cell, begin, geometric, listed, run_cell
from model_shapes import MODELS, chosen

from flashattn import _native


def gigaflops(shape):
    heads, d, queries, keys, causal, _ = shape
    return 2e-9 * queries * keys * sum(head_dims.widths(d)) * head_dims.widths(heads)[0] / (2 if causal else 1)


def cell_of(shape, dtype):
    (heads, heads_k), (d, d_v), (queries, keys, causal, _) = head_dims.widths(shape[0]), head_dims.widths(shape[1]), shape[2:]
    trains = heads == heads_k  # Cell knows gradients of one query head
    return Cell(dtype, d, queries, keys, heads, heads_k, causal, trains, trains, d_v)


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="beginnings of names, between commas; all")
    parser.add_argument("--threads", type=listed(int), default=[1])
    parser.add_argument("--dtypes", type=listed(), default=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=0.5, help="to time each cell for, all together")
    parser.add_argument("--most", type=float, default=40.0, metavar="GFLOP", help="of a forward")
    parser.add_argument("--command", default=str(compare_torch.ROOT / "build" / "cli" / "flashattn"), help="the flashattn that measures the peaks")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    options = parser.parse_args(words)
    if set(options.dtypes) - set(TOLERANCE):
        parser.error(f"--dtypes {','.join(options.dtypes)}: expected some of {', '.join(TOLERANCE)}")
    plain = {name: shape for name, shape in MODELS.items() if not shape[5] and gigaflops(shape) <= options.most}
    options.chosen = chosen(parser, options.models, plain)
    options.turns, options.no_torch = 3, False
    return options


def main():
    options = parse()
    report = begin(_native.device_info(), options)
    for dtype in options.dtypes:
        for name, shape in options.chosen.items():
            print(f"{name}: {shape[0]} heads, {shape[2]} queries on {shape[3]} keys")
            run_cell(report, options, lambda shape=shape, dtype=dtype: cell_of(shape, dtype), ["auto"], options.threads)
    print()
    rows = list(report.rows.values())
    geometric(rows)
    ratios = [row["ratio_min"] for row in rows if row["torch"] and row["pass"] != "forward+backward"]
    if ratios:
        print(f"{len(ratios)} cells of one pass: {statistics.geometric_mean(ratios):.2f} times PyTorch, least {min(ratios):.2f}, {sum(x < 1 for x in ratios)} below 1; {report.wrong} wrong answers")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
