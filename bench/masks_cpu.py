#!/usr/bin/env python3
"""Time scaled_dot_product_attention with masks on the CPU, ours (flashattn.sdpa) and PyTorch's by turns, and check every answer.

    make && python3 bench/masks_cpu.py [--threads 1] [--dtypes bfloat16,float32] [--head-dims 64,128] [--seqlens 1024,2048] [--masks all,bool,documents,...] [--seconds 0.5]

Batch 1, 512 / d heads. Masks: none; added ones in the inputs' dtype of each head (heads), of all heads (all) and of one row for all queries (row, as
padding is); boolean ones of all heads (bool) and of one row (padding, an eighth of the keys hidden); eight causal documents of random lengths,
which ours is told as a block mask (documents). The backward is that of Q, K and V. Times are the fastest of their turns,
in milliseconds. Each result's relative L2 error against float64 must be within the tests' tolerances, or the exit status is 1.
"""

import argparse
import itertools
import math
import random
import sys
import time

from compare_torch import TOLERANCE, listed, sdpa, take_turns, torch  # first: it finds the library

from flashattn import flash_attn_masked_func
from flashattn.masks import documents
from flashattn.sdpa import sdpa as ours

MASKS = ("none", "heads", "all", "row", "bool", "padding", "documents")


class Pass:
    """What take_turns takes turns with."""

    def __init__(self, run):
        self.run = run

    def step(self):
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


class Side:
    """Ours or PyTorch's: the forward without gradients, and the backward of one with."""

    def __init__(self, attention, inputs, dout, mask):
        self.attention, self.inputs, self.dout, self.mask = attention, inputs, dout, mask
        self.leaves = [t.detach().requires_grad_() for t in inputs]
        self.out = attention(*self.leaves, attn_mask=mask)

    def forward(self):
        return self.attention(*self.inputs, attn_mask=self.mask)

    def gradients(self):
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def results(self):
        return [self.forward(), self.out.detach(), *self.gradients()]


def masks(heads, s, dtype):
    """(name, what PyTorch is told, our attention)."""
    yield "none", None, ours
    for name, shape in (("heads", (heads, s, s)), ("all", (1, s, s)), ("row", (1, 1, s))):
        yield name, torch.randn(1, *shape).to(dtype), ours
    yield "bool", torch.rand(1, 1, s, s) > 0.1, ours
    yield "padding", (torch.arange(s) >= s // 8)[None, None, None], ours
    ends = [0, *sorted(random.Random(s).sample(range(1, s), 7)), s]
    shown = documents([b - a for a, b in itertools.pairwise(ends)])

    def packed(q, k, v, attn_mask):
        return flash_attn_masked_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), shown).transpose(1, 2)

    yield "documents", torch.from_numpy(shown.dense(s, s))[None], packed


def in_double(side):
    mask = side.mask if side.mask is None or side.mask.dtype == torch.bool else side.mask.double()
    return Side(sdpa, [t.double() for t in side.inputs], side.dout.double(), mask)


def errors(found, exact):
    """Relative L2 errors of out, twice, dq, dk, dv. NaN stays NaN."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def time_cell(dtype, d, s, wanted, seconds, ratios):
    """True if all is right. ratios: {(pass, dtype, kind): [of a cell, ...]}."""
    heads, number, right = 512 // d, getattr(torch, dtype), True
    *inputs, dout = [torch.randn(1, heads, s, d).to(number) for _ in range(4)]
    for name, mask, attention in masks(heads, s, number):
        if name not in wanted:
            continue
        sides = {"torch": Side(sdpa, inputs, dout, mask), "ours": Side(attention, inputs, dout, mask)}
        found = errors(sides["ours"].results(), in_double(sides["ours"]).results())
        good = all(error <= TOLERANCE[dtype] * (2 if n > 1 else 1) for n, error in enumerate(found))
        right &= good
        shown = []
        for label, run in (("forward", Side.forward), ("backward", Side.gradients)):
            times = take_turns({who: Pass(lambda run=run, side=side: run(side)) for who, side in sides.items()}, seconds, 3)
            theirs, own = (1e3 * min(times[who]) for who in ("torch", "ours"))
            shown.append(f"{theirs:8.2f} {own:8.2f} {theirs / own:6.2f}")
            kind = {"none": "no mask", "documents": name}.get(name, "masks")
            ratios.setdefault((label, dtype, kind), []).append(theirs / own)
        print(f"{dtype:9} {d:4} {s:5} {name:9} | {' | '.join(shown)} | {max(found):.0e}{'' if good else ' WRONG'}", flush=True)
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", type=listed(), default=["bfloat16", "float32"])
    parser.add_argument("--head-dims", type=listed(int), default=[64, 128])
    parser.add_argument("--seqlens", type=listed(int), default=[1024, 2048])
    parser.add_argument("--masks", type=listed(), default=list(MASKS))
    parser.add_argument("--seconds", type=float, default=0.5, help="to time each pass of a cell for")
    options = parser.parse_args()
    if set(options.masks) - set(MASKS):
        parser.error(f"--masks {','.join(options.masks)}: expected some of {', '.join(MASKS)}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    header = f"{'dtype':9} {'d':>4} {'s':>5} {'mask':9} | {'forward: torch, ours, ratio':24} | {'backward':24} | error"
    print(header, "-" * len(header), sep="\n")
    right, ratios = True, {}
    for dtype, d, s in itertools.product(options.dtypes, options.head_dims, options.seqlens):
        right &= time_cell(dtype, d, s, options.masks, options.seconds, ratios)
    for (label, dtype, kind), found in ratios.items():
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(f"{label:8} {dtype:9} {kind:9}: {mean:.2f} times PyTorch ({min(found):.2f} to {max(found):.2f}, {len(found)} cells)")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
