#!/usr/bin/env python3
"""Time pieces of prompts on one GPU, as a server has them (chunked prefill): the last queries of sequences on all of their keys, causal, ours beside
FlashAttention-3 and PyTorch's FlashAttention-2, and check every answer.

    make && python3 bench/prompts.py [--heads 8:1] [--queries 256,512] [--seqlens 8192,32768] [--batches 1,8] [--pages 64] [--fa3 LIBRARY] [--groups 5] [--json FILE]

bfloat16, TFLOP/s of pairs that are seen. ours: as it is called by default, the same bits in any batch; by batch: num_splits -1; whole: num_splits 1, keys not split.
Calls are in CUDA graphs. Peers and times are card.py's and fa3.py's.
"""

import argparse
import itertools
import sys

import card  # first: it finds the library
import fa3
import gpu
import head_dims
import torch
from flashattn import _call

PARTS = {"ours": 0, "by batch": -1, "whole": 1}  # num_splits


class Piece:
    def __init__(self, heads, d, batch, queries, keys, page=0):
        (self.heads, self.heads_k), self.d, self.batch, self.queries, self.keys, self.page = head_dims.widths(heads), d, batch, queries, keys, page
        self.q = torch.randn(batch, queries, self.heads, d, device=card.DEVICE, dtype=torch.bfloat16)
        self.k, self.v = (torch.randn(batch, keys, self.heads_k, d, device=card.DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def flops(self):
        return 4 * self.d * self.heads * self.batch * (self.queries * (self.keys - self.queries) + self.queries * (self.queries + 1) // 2)

    def wrong(self, out):
        """The relative L2 error of the last sequence's first and last head, or None if all is well."""
        hidden = torch.ones(self.queries, self.keys, dtype=torch.bool, device=card.DEVICE).triu_(self.keys - self.queries + 1)
        error = norm = 0.0
        for head in {0, self.heads - 1}:
            k, v = (t[-1, :, head * self.heads_k // self.heads].double() for t in (self.k, self.v))
            scores = (self.q[-1, :, head].double() @ k.T * self.d**-0.5).masked_fill_(hidden, float("-inf"))
            truth = scores.softmax(-1) @ v
            error += (out[-1, :, head].double() - truth).square().sum()
            norm += truth.square().sum()
        error = (error / norm).sqrt().item()
        return None if error <= 1e-2 else error

    def ours(self, parts):
        k, v, table = self.k, self.v, None
        if self.page:  # the same keys, in other places
            places = torch.randperm(self.batch * self.keys // self.page, device=card.DEVICE)
            table = torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=card.DEVICE)).to(torch.int32).view(self.batch, -1)
            k, v = (t.reshape(-1, self.page, self.heads_k, self.d)[places] for t in (k, v))
        out = torch.full_like(self.q, float("nan"))
        call = _call.Call(self.q, k, v, causal=True, num_splits=parts, block_table=table)
        call._set_results(out, None)
        run = card.forwards([call])
        run()
        return run, out

    def fa3(self):
        def run():
            return fa3.causal(self.q, self.k, self.v)

        return run, run()

    def flash(self):
        ends = [torch.arange(self.batch + 1, device=card.DEVICE, dtype=torch.int32) * n for n in (self.queries, self.keys)]
        packed = [t.flatten(0, 1) for t in (self.q, self.k, self.v)]

        def run():
            return torch.ops.aten._flash_attention_forward(*packed, *ends, self.queries, self.keys, 0.0, True, False)[0].view(self.q.shape)

        return run, run()

    def graph(self, name):
        run, out = self.ours(PARTS[name]) if name in PARTS else getattr(self, name)()
        return card.graph_of(run, self.wrong(out))


def bench(piece, names, groups):
    """{name: TFLOP/s, "WRONG ..." or None where it has no kernel}"""
    row, graphs = {}, {}
    for name in names:
        try:
            graphs[name] = piece.graph(name)
        except Exception as problem:  # no kernel or no memory
            row[name] = None
            if name != "flash":
                print(f"  {name}: {card.first_line(problem)}")
    row.update({name: graph for name, graph in graphs.items() if isinstance(graph, str)})
    runs = {name: graph.replay for name, graph in graphs.items() if not isinstance(graph, str)}
    row.update({name: piece.flops() / ms / 1e9 for name, ms in card.time_by_turns(runs, groups).items()})
    return row


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="8:1,32:8", help="query heads on key heads, between commas")
    parser.add_argument("--head-dims", default="128")
    parser.add_argument("--queries", default="256,512,1024,2048")
    parser.add_argument("--seqlens", default="8192,32768")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--pages", type=int, default=0, help="our keys in pages of so many")
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    options.cells = [(heads, *numbers) for heads, *numbers in itertools.product(options.heads.split(","), *(map(int, x.split(",")) for x in (options.head_dims, options.batches, options.queries, options.seqlens)))]
    for heads, d, batch, queries, keys in options.cells:
        if min(d, batch, queries) < 1 or queries > keys or options.pages < 0 or (options.pages and keys % options.pages):
            parser.error(f"{queries} queries of {keys} keys in pages of {options.pages}, {batch} sequences, head_dim {d}: expected no more queries than keys, whole pages and no number below 1")
    return options


def main():
    options = parse()
    before, rows, ratios = gpu.begin(options), [], []
    if before is None:
        return 0
    names = [*PARTS, "flash", *(["fa3"] if options.fa3 else [])]
    print(f"{'heads':>6} {'d':>4} {'b':>3} {'q':>5} {'keys':>7} | " + " ".join(f"{n:>8}" for n in names) + " | /best  by batch")
    for heads, d, batch, queries, keys in options.cells:
        row = bench(Piece(heads, d, batch, queries, keys, options.pages), names, options.groups)
        over = [gpu.over_best({"ours": row[name], **{n: row.get(n) for n in names if n not in PARTS}}) for name in ("ours", "by batch")]
        ratios += [over[0]] if over[0] else []
        rows.append({"heads": heads, "head_dim": d, "batch": batch, "queries": queries, "keys": keys, "pages": options.pages, "tflops": row})
        shown = [f"{x:8.0f}" if isinstance(x, float) else f"{x or '-':>8}" for x in map(row.get, names)]
        print(f"{heads:>6} {d:4} {batch:3} {queries:5} {keys:7} | " + " ".join(shown) + " | " + "  ".join(f"{x:5.2f}" if x else "    -" for x in over), flush=True)
        card.write_report(options.json, "flashattn-prompts-1", before, rows)
    return card.end(rows, ratios)


if __name__ == "__main__":
    sys.exit(main())
