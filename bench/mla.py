#!/usr/bin/env python3
"""Time multi-head latent attention (MLA) on one GPU: head_dim 576, V the first 512 columns of K, all query heads on one key head, beside its peers.

    make && python3 bench/mla.py [--heads 16,64,128] [--queries 1,2] [--batches 1,8,32,128] [--seqlens 4096,16384] [--groups 5] [--pages 64]
                                 [--one-part] [--portable] [--fa3 LIBRARY] [--json FILE]
    make && python3 bench/mla.py --prefill [--heads 16,128] [--seqlens 1024,4096]

bfloat16, causal (a query sees the keys up to its own, the last ones of the sequence being the queries'). Peers: PyTorch's memory-efficient attention
(`efficient`, on K and V spread over the heads by stride 0), which alone of its backends takes such head dims, and with --fa3 FlashAttention-3, to which the
512 columns are its `q_v` and V, the other 64 its Q and K (fa3.py says where to get it). --portable adds our kernel for any GPU, --one-part our call with
num_splits 1, --pages puts our keys into shuffled pages. By default we part the keys by their number alone, so that a sequence has the same bits in any
batch; FlashAttention-3 parts them by the batch too, and so do we with num_splits -1 (`by batch`). TFLOP/s count 2 (576 + 512) b h
pairs, a pair being a query and a key that it sees; GB/s count K once, Q and O. `read` is a sum over as many bytes. Calls are replayed by a CUDA graph, each
on keys of its own, so that none is in L2 from the call before; ours and the peers take turns in random order, medians of groups of launches. Each answer is
compared with float64 first, on the last sequence; a wrong one is shown as WRONG and makes the exit status 1.
"""

import argparse
import itertools
import sys

import card  # first: it finds the library
import fa3
import torch
from flashattn import _call
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

D, DV = 576, 512
SCALE = 192**-0.5  # of the head dims before the projection into the latent space


class Cell:
    """One problem; `sets` calls have keys of their own."""

    L2_BYTES, MOST_SETS, POOL_BYTES = 256 << 20, 32, 8 << 30

    def __init__(self, batch, heads, queries, keys):
        self.batch, self.heads, self.queries, self.keys = batch, heads, queries, keys
        self.k_bytes = 2 * batch * keys * D
        self.sets = max(1, min(self.MOST_SETS, -(-self.L2_BYTES // self.k_bytes), self.POOL_BYTES // self.k_bytes))
        self.kv = [torch.randn(batch, keys, 1, D, device=card.DEVICE, dtype=torch.bfloat16) for _ in range(self.sets)]
        self.q = torch.randn(batch, queries, heads, D, device=card.DEVICE, dtype=torch.bfloat16)
        self.bytes = self.k_bytes + 2 * batch * queries * heads * (D + DV)
        pairs = queries * keys - queries * (queries - 1) // 2
        self.flops = 2 * (D + DV) * batch * heads * pairs

    def wrong(self, out):
        """The relative L2 error of the last sequence of the last set, a quarter of its heads, or None if all is well."""
        heads = slice(0, max(1, self.heads // 4))
        q, kv = self.q[-1, :, heads].double(), self.kv[-1][-1, :, 0].double()
        scores = torch.einsum("qhd,kd->hqk", q, kv) * SCALE
        hidden = torch.arange(self.keys, device=card.DEVICE) > torch.arange(self.queries, device=card.DEVICE)[:, None] + self.keys - self.queries
        truth = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), kv[:, :DV])
        error = ((out[-1, :, heads].double() - truth).norm() / truth.norm()).item()
        return None if error <= 1e-2 else error

    def ours(self, context=None, page=0, parts=0):
        """(what makes the calls of all sets, its error)"""
        table, out = None, torch.full((*self.q.shape[:3], DV), float("nan"), device=card.DEVICE, dtype=torch.bfloat16)
        if page:
            table = torch.randperm(self.batch * self.keys // page, device=card.DEVICE).to(torch.int32)
        calls = []
        for kv in self.kv:
            if page:  # the same keys, in other places
                pages = torch.empty(self.batch * self.keys // page, page, 1, D, device=card.DEVICE, dtype=torch.bfloat16)
                pages[table.long()] = kv.view_as(pages)
                kv = pages
            call = _call.Call(self.q, kv, kv[..., :DV], scale=SCALE, causal=True, num_splits=parts,
                              block_table=None if table is None else table.view(self.batch, -1))
            call.context = context
            call._set_results(out, None)
            calls.append(call)
        run = card.forwards(calls, context)
        run()
        return run, self.wrong(out)

    def fa3(self):
        def run():
            return [fa3.latent(self.q, kv, DV, SCALE) for kv in self.kv][-1]

        return run, self.wrong(run())

    def efficient(self):
        q, views = self.q.transpose(1, 2), [kv.transpose(1, 2).expand(-1, self.heads, -1, -1) for kv in self.kv]
        mask = None
        if self.queries > 1:  # its causal mask is aligned to the first key
            mask = torch.zeros(self.queries, self.keys, device=card.DEVICE, dtype=torch.bfloat16)
            mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu_(self.keys - self.queries + 1), float("-inf"))

        def run():
            with sdpa_kernel(card.PEERS["efficient"]), torch.no_grad():
                return [scaled_dot_product_attention(q, kv, kv[..., :DV], attn_mask=mask, scale=SCALE) for kv in views][-1]

        return run, self.wrong(run().transpose(1, 2))

    def read(self):
        views = [kv.view(-1).view(torch.float32) for kv in self.kv]
        return lambda: [view.sum() for view in views], None

    def graph(self, name, page):
        """What replays the calls of all sets, or "WRONG ..."."""
        own = {"ours": lambda: self.ours(page=page), "by batch": lambda: self.ours(page=page, parts=-1), "one part": lambda: self.ours(page=page, parts=1),
               "portable": lambda: self.ours(card.kernel_context("forward_sm80"), page)}
        return card.graph_of(*(own[name]() if name in own else getattr(self, name)()))


def bench(cell, names, page, groups):
    """{name: microseconds, "WRONG ..." or None where it has no kernel}"""
    row, times = card.time_graphs(lambda name: cell.graph(name, page), names, groups, set(names) - {"ours", "fa3"})
    return {**row, **{name: 1e3 * ms / cell.sets for name, ms in times.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,64,128")
    parser.add_argument("--queries", default="1,2")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--seqlens", default="4096,16384")
    parser.add_argument("--prefill", action="store_true", help="as many queries as keys, one sequence")
    parser.add_argument("--pages", type=int, default=0, help="our keys in pages of so many")
    parser.add_argument("--one-part", action="store_true", help="our call with num_splits 1 too")
    parser.add_argument("--portable", action="store_true", help="our kernel for any GPU too")
    parser.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3 too: see fa3.py")
    parser.add_argument("--groups", type=int, default=5, help="timed groups of launches")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not card.present():
        print("skipped: no CUDA device")
        return 0
    heads, queries, batches, seqlens = ([int(x) for x in text.split(",")] for text in (options.heads, options.queries, options.batches, options.seqlens))
    if options.pages < 0 or (options.pages and any(n % options.pages for n in seqlens)):
        parser.error("--pages is at least 0, and every length is whole pages")
    if options.fa3:
        fa3.load(options.fa3)
    torch.manual_seed(0)
    before, rows = card.state(), []
    names = ["ours", "by batch", *(["one part"] if options.one_part else []), *(["portable"] if options.portable else []), "efficient", *(["fa3"] if options.fa3 else []), "read"]
    print(f"before: {before}; PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    header = f"{'heads':>5} {'q':>5} {'b':>4} {'keys':>6} | " + " ".join(f"{n:>9}" for n in names) + " us | TFLOP/s  GB/s  /read" + ("   /fa3  by b." if options.fa3 else "")
    print(header, "-" * len(header), sep="\n")
    shapes = [(h, n, 1, n) for h, n in itertools.product(heads, seqlens)] if options.prefill else itertools.product(heads, queries, batches, seqlens)
    for h, q, b, n in shapes:
        if b * n > 128 * 4096:
            continue
        cell = Cell(b, h, q, n)
        row = bench(cell, names, options.pages, options.groups)
        times = {name: x for name, x in row.items() if isinstance(x, float)}
        us = times.get("ours")
        shown = [f"{x:9.1f}" if isinstance(x, float) else f"{x or '-':>9}" for x in map(row.get, names)]
        over = [times[name] / us if us and name in times else None for name in ("read", "fa3")[: 2 if options.fa3 else 1]]
        if options.fa3:
            over.append(times["fa3"] / times["by batch"] if "fa3" in times and "by batch" in times else None)
        print(f"{h:5} {q:5} {b:4} {n:6} | " + " ".join(shown) + f"    | {cell.flops / us / 1e6 if us else 0:7.0f} {cell.bytes / us / 1e3 if us else 0:5.0f}  " +
              "  ".join(f"{x:5.2f}" if x else "    -" for x in over), flush=True)
        rows.append({"heads": h, "queries": q, "batch": b, "seqlen": n, "microseconds": row, "flops": cell.flops, "bytes": cell.bytes})
        del cell
    print(f"after: {card.state()}")
    card.write_report(options.json, "flashattn-mla-bench-1", before, rows, pages=options.pages)
    return int(any(isinstance(x, str) for row in rows for x in row["microseconds"].values()))


if __name__ == "__main__":
    sys.exit(main())
