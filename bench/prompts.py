#!/usr/bin/env python3
"""Time pieces of prompts on one GPU, as a server has them (chunked prefill): the last queries of sequences on all of their keys, causal, ours beside
FlashAttention-3 and PyTorch's FlashAttention-2, and check every answer.

    make && python3 bench/prompts.py [--heads 8:1] [--queries 256,512] [--seqlens 8192,32768] [--batches 1,8] [--pages 64] [--fa3 LIBRARY] [--groups 5] [--json FILE]
    python3 bench/prompts.py --among 15,63 ...       # one piece in the middle of so many sequences that decode, of one query each and as many keys, packed, with used lengths

bfloat16, TFLOP/s of pairs that are seen; --among: microseconds, where less is better and a ratio above 1 too. ours: as it is called by default, the same bits in any batch; by batch: num_splits -1; whole: num_splits 1, keys not split.
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
    """Pieces of `batch` sequences, all alike."""

    def __init__(self, heads, d, batch, queries, keys, page=0):
        self.batch = batch
        self.fill(heads, d, [queries] * batch, queries, keys, page)
        self.q, self.k, self.v = (t.unflatten(0, (batch, -1)) for t in (self.q, self.k, self.v))

    def fill(self, heads, d, counts, queries, keys, page):
        """Packed sequences of so many queries, all with as many keys."""
        (self.heads, self.heads_k), self.d, self.queries, self.keys, self.page = head_dims.widths(heads), d, queries, keys, page
        self.ends_q, self.ends_k = (torch.tensor([0, *n], device=card.DEVICE).cumsum(0).to(torch.int32) for n in (counts, [keys] * len(counts)))
        self.q = torch.randn(sum(counts), self.heads, d, device=card.DEVICE, dtype=torch.bfloat16)
        self.k, self.v = (torch.randn(len(counts) * keys, self.heads_k, d, device=card.DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def flops(self):
        return 4 * self.d * self.heads * self.batch * (self.queries * (self.keys - self.queries) + self.queries * (self.queries + 1) // 2)

    def checked(self, out):
        """(queries, keys, values, O) of the sequences that are checked: [rows, heads, d]."""
        return [(self.q[-1], self.k[-1], self.v[-1], out[-1])]

    def wrong(self, out):
        """The relative L2 error of the first and last head, or None if all is well."""
        for q, keys, values, o in self.checked(out):
            hidden = torch.ones(len(q), self.keys, dtype=torch.bool, device=card.DEVICE).triu_(self.keys - len(q) + 1)
            error = norm = 0.0
            for head in {0, self.heads - 1}:
                k, v = (t[:, head * self.heads_k // self.heads].double() for t in (keys, values))
                scores = (q[:, head].double() @ k.T * self.d**-0.5).masked_fill_(hidden, float("-inf"))
                truth = scores.softmax(-1) @ v
                error += (o[:, head].double() - truth).square().sum()
                norm += truth.square().sum()
            error = (error / norm).sqrt().item()
            if not error <= 1e-2:
                return error
        return None

    def lengths(self):
        """What a call is told of packed sequences, and ours besides."""
        return {}

    own_lengths = lengths

    def ours(self, parts):
        k, v, table, lengths = self.k, self.v, None, self.own_lengths()
        if self.page:  # the same keys, in other places
            k, v = (t.reshape(-1, self.page, self.heads_k, self.d) for t in (k, v))
            places = torch.randperm(len(k), device=card.DEVICE)
            k, v = (torch.empty_like(t).index_copy_(0, places, t) for t in (k, v))
            table = places.to(torch.int32).view(-1, self.keys // self.page)
        out = torch.full_like(self.q, float("nan"))
        call = _call.Call(self.q, k, v, causal=True, num_splits=parts, block_table=table, **lengths)
        call._set_results(out, None)
        run = card.forwards([call])
        run()
        return run, out

    def fa3(self):
        def run():
            return fa3.causal(self.q, self.k, self.v, **self.lengths())

        return run, run()

    def flash(self):
        packed = [t.flatten(0, -3) for t in (self.q, self.k, self.v)]

        def run():
            return torch.ops.aten._flash_attention_forward(*packed, self.ends_q, self.ends_k, self.queries, self.keys, 0.0, True, False)[0].view(self.q.shape)

        return run, run()

    def graph(self, name):
        run, out = self.ours(PARTS[name]) if name in PARTS else getattr(self, name)()
        return card.graph_of(run, self.wrong(out))


class Among(Piece):
    """One piece, and so many sequences of one query on both sides of it."""

    def __init__(self, heads, d, others, queries, keys, page=0):
        self.others, self.before = others, others // 2
        self.fill(heads, d, [1] * self.before + [queries] + [1] * (others - self.before), queries, keys, page)

    def checked(self, out):
        ends, found = self.ends_q.tolist(), []
        for n in {0, self.before, self.others}:
            rows, keys = slice(ends[n], ends[n + 1]), slice(n * self.keys, (n + 1) * self.keys)
            found.append((self.q[rows], self.k[keys], self.v[keys], out[rows]))
        return found

    def lengths(self):
        return {"cu_seqlens_q": self.ends_q, "cu_seqlens_k": self.ends_k, "max_seqlen_q": self.queries, "max_seqlen_k": self.keys}

    def own_lengths(self):
        """A cache says how many keys are used; where it has pages that is all."""
        used = {"seqused_k": torch.full((self.others + 1,), self.keys, device=card.DEVICE, dtype=torch.int32)}
        return {**{name: x for name, x in self.lengths().items() if not (self.page and name.endswith("_k"))}, **used}


def bench(piece, names, groups):
    """{name: TFLOP/s (of Among microseconds), "WRONG ..." or None where it has no kernel}"""
    row, times = card.time_graphs(piece.graph, names, groups, ("flash",))
    return {**row, **{name: 1e3 * ms if isinstance(piece, Among) else piece.flops() / ms / 1e9 for name, ms in times.items()}}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="8:1,32:8", help="query heads on key heads, between commas")
    parser.add_argument("--head-dims", default="128")
    parser.add_argument("--queries", default="256,512,1024,2048")
    parser.add_argument("--seqlens", default="8192,32768")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--among", help="sequences that decode beside one piece, between commas; in place of --batches")
    parser.add_argument("--pages", type=int, default=0, help="our keys in pages of so many")
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    options.cells = [(heads, *numbers) for heads, *numbers in itertools.product(options.heads.split(","), *(map(int, x.split(",")) for x in (options.head_dims, options.among or options.batches, options.queries, options.seqlens)))]
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
    print(f"{'heads':>6} {'d':>4} {'among' if options.among else 'b':>5} {'q':>5} {'keys':>7} | " + " ".join(f"{n:>8}" for n in names) + " | /best  by batch")
    for heads, d, batch, queries, keys in options.cells:
        row = bench((Among if options.among else Piece)(heads, d, batch, queries, keys, options.pages), names, options.groups)
        speeds = {n: 1 / x if options.among and isinstance(x, float) else x for n, x in row.items()}
        over = [gpu.over_best({"ours": speeds[name], **{n: speeds.get(n) for n in names if n not in PARTS}}) for name in ("ours", "by batch")]
        ratios += [over[0]] if over[0] else []
        rows.append({"heads": heads, "head_dim": d, "among" if options.among else "batch": batch, "queries": queries, "keys": keys, "pages": options.pages,
                     "microseconds" if options.among else "tflops": row})
        shown = [f"{x:8.0f}" if isinstance(x, float) else f"{x or '-':>8}" for x in map(row.get, names)]
        print(f"{heads:>6} {d:4} {batch:5} {queries:5} {keys:7} | " + " ".join(shown) + " | " + "  ".join(f"{x:5.2f}" if x else "    -" for x in over), flush=True)
        card.write_report(options.json, "flashattn-prompts-1", before, rows)
    return card.end(rows, ratios, speeds="microseconds" if options.among else "tflops")


if __name__ == "__main__":
    sys.exit(main())
