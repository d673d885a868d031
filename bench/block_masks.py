#!/usr/bin/env python3
"""Time block masks (slices) on one GPU, ours beside FlexAttention's, and check every answer.

    make && python3 bench/block_masks.py [--head-dims 64,128,256] [--seqlens 2048,8192] [--patterns documents,answers,...] [--passes forward] [--heads 32:8] [--tokens 16384]
                                         [--softcap 30] [--alibi] [--flex] [--portable] [--fa3 LIBRARY] [--groups 7] [--json FILE]

bfloat16, hidden dimension 2048, 16384 tokens. Patterns of a sequence: documents (of random lengths, an eighth of it on average, each causal), chunks (eight causal ones, as chunked attention
has), answers (a question of a quarter that eight answers see, which do not see one another; causal), sinks (the first 64 keys and a causal window of an eighth), prefix (a quarter
that all see, the rest causal), sparse (of blocks of 128 x 128 the diagonal's and a random quarter of the others).
--flex adds FlexAttention with a block mask, compiled for each shape; --portable our kernels for any GPU; for documents and chunks there are PyTorch's varlen_attn (flash, FlashAttention-2)
and with --fa3 FlashAttention-3, which have them as packed sequences. TFLOP/s count pairs that are seen. Answers and times are gpu.py's.
"""

import argparse
import copy
import itertools
import random
import sys

import card  # first: it finds the library
import fa3
import gpu
import head_dims
import torch

FULL, CAUSAL, INVERSE, BOTH = range(4)
PATTERNS = ("documents", "chunks", "answers", "sinks", "prefix", "sparse")


def document_ends(seqlen, pattern):
    if pattern == "chunks":
        return [seqlen * (n + 1) // 8 for n in range(8)]
    return sorted({seqlen, *random.Random(seqlen).sample(range(1, seqlen), 7)})


def spans(ends):
    return zip([0, *ends], ends)


def number_of_span(ends, seqlen):
    return torch.searchsorted(torch.tensor(ends, device=card.DEVICE), torch.arange(seqlen, device=card.DEVICE), right=True)


def block_mask(pattern, s):
    """(slices, what FlexAttention is told, ends of documents or None)"""
    if pattern in ("documents", "chunks"):
        ends = document_ends(s, pattern)
        of = number_of_span(ends, s)
        return [(a, b, a, b, CAUSAL) for a, b in spans(ends)], lambda b, h, i, j: (of[i] == of[j]) & (i >= j), ends
    if pattern == "answers":
        first = s // 4
        ends = [first, *(first + (s - first) * (n + 1) // 8 for n in range(8))]
        of = number_of_span(ends, s)
        return [(0, first, 0, first, CAUSAL), (first, s, 0, first, FULL), *((a, b, a, b, CAUSAL) for a, b in list(spans(ends))[1:])], lambda b, h, i, j: (i >= j) & ((j < first) | (of[i] == of[j])), None
    if pattern == "sinks":
        sinks, width = 64, s // 8
        band = [(0, width, 0, width, CAUSAL), (width, s, 1, s, BOTH)]
        return [*band, (width, s, 0, sinks, FULL)], lambda b, h, i, j: (i >= j) & ((j < sinks) | (i - j < width)), None
    if pattern == "prefix":
        first = s // 4
        return [(0, s, 0, first, FULL), (first, s, first, s, CAUSAL)], lambda b, h, i, j: (j < first) | (i >= j), None
    blocks = -(-s // 128)
    draw, table = random.Random(s), torch.eye(blocks, dtype=torch.bool)
    for n, m in itertools.product(range(blocks), repeat=2):
        table[n, m] |= draw.random() < 0.25
    slices, table = [(128 * n, 128 * n + 128, 128 * m, 128 * m + 128, FULL) for n, m in table.nonzero().tolist()], table.to(card.DEVICE)
    return slices, lambda b, h, i, j: table[i // 128, j // 128], None


class MaskedCell(gpu.Cell):
    def __init__(self, pattern, d, seqlen, options, d_v=None):
        self.pattern, place = pattern, torch.arange(seqlen, device=card.DEVICE)
        slices, self.sees, self.ends = block_mask(pattern, seqlen)
        self.slices = torch.tensor(slices, dtype=torch.int32)
        self.hidden = ~self.sees(0, 0, place[:, None], place[None, :])
        self.pairs = (~self.hidden).sum().item()
        super().__init__(d, seqlen, False, options, d_v)
        del self.hidden

    def flops(self, backward):
        share = head_dims.backward_share((self.d, self.d_v)) if backward else 1
        return 2 * self.pairs * len(self.lengths) * (self.d + self.d_v) * self.heads * share


def as_packed(cell, peer):
    """A peer that has the documents as packed sequences."""
    packed = copy.copy(cell)
    packed.causal, packed.window, packed.packed = True, (-1, 0), True
    packed.q, packed.k, packed.v, packed.dout = (t.flatten(0, 1) for t in (cell.q, cell.k, cell.v, cell.dout))
    ends = [0, *(n * cell.seqlen + end for n in range(len(cell.lengths)) for end in cell.ends)]
    packed.cu, packed.seqlen = torch.tensor(ends, device=card.DEVICE, dtype=torch.int32), max(b - a for a, b in spans(cell.ends))
    shaped = lambda results: [t.view(len(cell.lengths), cell.seqlen, *t.shape[1:]) for t in results]  # noqa: E731
    forward, backward = peer(packed)
    return lambda: shaped(forward()), lambda: shaped(backward())


def runs_of(cell, names):
    own = {"ours": gpu.ours, "portable": gpu.portable, "flex": gpu.flex}
    runs = {}
    for name in names:
        try:
            if name in own:
                runs[name] = own[name](cell)
            elif cell.ends:
                runs[name] = as_packed(cell, fa3.peer if name == "fa3" else lambda packed: gpu.packed_peer(packed, "flash"))
        except Exception as problem:
            print(f"  {name}: {card.first_line(problem)}")
    return runs


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqlens", default="2048,8192")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--passes", choices=["forward", "backward", "both"], default="both")
    parser.add_argument("--heads")
    parser.add_argument("--tokens", type=int, default=gpu.TOKENS)
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--alibi", action="store_true")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--groups", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    own = parser.parse_args()
    options = gpu.parse([])
    for name in ("passes", "tokens", "softcap", "alibi", "groups"):
        setattr(options, name, getattr(own, name))
    try:
        options.head_dims, options.heads = [head_dims.widths(d) for d in own.head_dims.split(",")], gpu.heads_of(own.heads)
        options.seqlens, options.patterns = [int(s) for s in own.seqlens.split(",")], own.patterns.split(",")
    except ValueError as problem:
        parser.error(f"{problem}: expected numbers between commas")
    if min(options.seqlens) < 512:
        parser.error(f"--seqlens {own.seqlens}: at least 512, for the first 64 keys and a window of an eighth")
    if set(options.patterns) - set(PATTERNS):
        parser.error(f"--patterns {own.patterns}: expected some of {', '.join(PATTERNS)}")
    options.json, options.fa3 = own.json, own.fa3
    plain = not (own.softcap or own.alibi)
    options.names = ["ours", *(n for n, wanted in (("portable", own.portable), ("flex", own.flex), ("flash", plain), ("fa3", own.fa3 and plain)) if wanted)]
    return options


def main():
    options = parse()
    before, names, rows, ratios = gpu.begin(options), options.names, [], []
    if before is None:
        return 0
    print(f"{'pass':8} {'d':>7} {'pattern':9} {'s':>5} seen | " + " ".join(f"{n:>8}" for n in names) + " | /best")
    for d, pattern, seqlen in itertools.product(options.head_dims, options.patterns, options.seqlens):
        cell = MaskedCell(pattern, d[0], seqlen, options, d[1])
        runs = runs_of(cell, names)
        for backward in gpu.PASSES[options.passes]:
            row = gpu.bench_pass(cell, backward, runs, options.groups)
            over = gpu.over_best(row)
            ratios += [over] if over else []
            rows.append({"pass": "backward" if backward else "forward", "head_dim": d[0], "head_dim_v": d[1], "pattern": pattern, "seqlen": seqlen, "heads": cell.heads, "heads_k": cell.heads_k,
                         "tokens": cell.tokens, "softcap": options.softcap, "alibi": options.alibi, "seen": cell.pairs / seqlen**2, "tflops": row})
            shown = [f"{x:8.1f}" if isinstance(x, float) else f"{x or '-':>8}" for x in (row.get(n) for n in names)]
            print(f"{rows[-1]['pass']:8} {head_dims.title(d):>7} {pattern:9} {seqlen:5} {100 * rows[-1]['seen']:3.0f}% | " + " ".join(shown) + " | " + (f"{over:5.2f}" if over else "    -"), flush=True)
            card.write_report(options.json, "flashattn-block-masks-1", before, rows)
    return card.end(rows, ratios)


if __name__ == "__main__":
    sys.exit(main())
