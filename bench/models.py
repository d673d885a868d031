#!/usr/bin/env python3
"""Time the attention of well-known models on one GPU, ours beside PyTorch's and FlashAttention-3's, and check every answer.

    make && python3 bench/models.py [--models vit,llama] [--passes forward] [--tokens 16384] [--fa3 LIBRARY] [--groups 5] [--json FILE]

bfloat16, as many sequences as have 16384 queries in all, at least one, of the shapes in model_shapes.py. --models takes those whose names begin so. TFLOP/s,
peers, answers and times are gpu.py's.
"""

import argparse
import sys

import card  # first: it finds the library
import gpu
import head_dims
from model_shapes import MODELS, chosen


def cell_of(shape, options):
    """The cell, and who is timed in it."""
    heads, d, queries, keys, causal, window = shape
    own = gpu.parse([f"--heads={heads}", f"--tokens={options.tokens}", f"--window={window}", *([f"--fa3={options.fa3}"] if options.fa3 else [])])
    d, d_v = head_dims.widths(d)
    return gpu.Cell(d, queries, causal, own, d_v, keys), gpu.names_of(own)


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="beginnings of names, between commas; all")
    parser.add_argument("--passes", choices=["forward", "backward", "both"], default="both")
    parser.add_argument("--tokens", type=int, default=gpu.TOKENS)
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(words)
    options.chosen = chosen(parser, options.models, MODELS)
    if options.tokens < 1:
        parser.error(f"--tokens {options.tokens}: at least 1")
    return options


def main():
    options = parse()
    before, rows, ratios = gpu.begin(options), [], []
    if before is None:
        return 0
    names = ["ours", "efficient", "flash", "cudnn", *(["fa3"] if options.fa3 else [])]
    print(f"{'model':24} {'heads':>5} {'d':>7} {'queries':>7} {'keys':>5} {'mask':>6} {'pass':8} | " + " ".join(f"{n:>9}" for n in names) + " | /best")
    for name, shape in options.chosen.items():
        heads, d, queries, keys, causal, window = shape
        cell, timed = cell_of(shape, options)
        runs = gpu.runs_of(cell, timed)
        for backward in gpu.PASSES[options.passes]:
            row = gpu.bench_pass(cell, backward, runs, options.groups)
            over = gpu.over_best(row)
            ratios += [over] if over else []
            rows.append({"model": name, "pass": "backward" if backward else "forward", "heads": heads, "head_dim": d, "queries": queries, "keys": keys, "causal": causal,
                         "window": window, "tokens": cell.tokens, "tflops": row})
            shown = [f"{x:9.1f}" if isinstance(x, float) else f"{x or '-':>9}" for x in (row.get(n) for n in names)]
            mask = str(window) if window else "causal" if causal else "none"
            print(f"{name:24} {heads:>5} {d:>7} {queries:7} {keys:5} {mask:>6} {rows[-1]['pass']:8} | " + " ".join(shown) + " | " + (f"{over:5.2f}" if over else "    -"), flush=True)
            card.write_report(options.json, "flashattn-models-1", before, rows)
        del cell, runs
    return card.end(rows, ratios)


if __name__ == "__main__":
    sys.exit(main())
