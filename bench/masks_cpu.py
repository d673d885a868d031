#!/usr/bin/env python3
"""Time scaled_dot_product_attention with masks on the CPU, ours (flashattn.sdpa) and PyTorch's by turns, and check every answer.

    make && python3 bench/masks_cpu.py [--threads 1] [--dtypes bfloat16,float32] [--head-dims 64,128] [--seqlens 1024,2048] [--seconds 0.5]

Batch 1, 512 / d heads. Masks: none; added ones in the inputs' dtype of each head (heads), of all heads (all) and of one row for all queries (row, as
padding is); boolean ones of all heads (bool) and of one row (padding, an eighth of the keys hidden). The backward is that of Q, K and V. Times are the fastest of their turns,
in milliseconds. Each result's relative L2 error against float64 must be within the tests' tolerances, or the exit status is 1.
"""

import argparse
import math
import sys
import time

import compare_torch  # first: it finds the library
import torch
from torch.nn.functional import scaled_dot_product_attention as theirs

from flashattn.sdpa import sdpa as ours

TOLERANCE = compare_torch.TOLERANCE


def masks(heads, s, dtype):
    yield "none", None
    for name, shape in (("heads", (heads, s, s)), ("all", (1, s, s)), ("row", (1, 1, s))):
        yield name, torch.randn(1, *shape).to(dtype)
    yield "bool", torch.rand(1, 1, s, s) > 0.1
    yield "padding", (torch.arange(s) >= s // 8)[None, None, None]


def error(found, exact):
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


def run(attention, inputs, dout, mask):
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attention(*leaves, attn_mask=mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def fastest(calls, seconds):
    """Milliseconds of each of the calls, which take turns."""
    best, end = [math.inf] * len(calls), time.perf_counter() + seconds
    turns = 0
    while turns < 3 or time.perf_counter() < end:
        for n, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[n] = min(best[n], 1e3 * (time.perf_counter() - begin))
        turns += 1
    return best


def time_cell(dtype, d, s, options):
    """True if all is right."""
    heads, right, number = 512 // d, True, getattr(torch, dtype)
    inputs, dout = [torch.randn(1, heads, s, d).to(number) for _ in range(3)], torch.randn(1, heads, s, d).to(number)
    for name, mask in masks(heads, s, number):
        double = mask if mask is None or mask.dtype == torch.bool else mask.double()
        exact = run(theirs, [t.double() for t in inputs], dout.double(), double)
        wrong = error(run(ours, inputs, dout, mask), exact)
        right &= wrong <= 2 * TOLERANCE[dtype]
        forward = fastest([lambda f=f: f(*inputs, attn_mask=mask) for f in (theirs, ours)], options.seconds)
        backward = []
        for f in (theirs, ours):
            leaves = [t.detach().requires_grad_() for t in inputs]
            out = f(*leaves, attn_mask=mask)
            backward.append(lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, dout, retain_graph=True))
        backward = fastest(backward, options.seconds)
        shown = " | ".join(f"{a:8.2f} {b:8.2f} {a / b:6.2f}" for a, b in (forward, backward))
        print(f"{dtype:9} {d:4} {s:5} {name:8} | {shown} | {wrong:.0e}{'' if wrong <= 2 * TOLERANCE[dtype] else ' WRONG'}", flush=True)
        keep_ratios(forward, backward, name, dtype)
    return right


RATIOS = {}


def keep_ratios(forward, backward, name, dtype):
    for label, (a, b) in (("forward", forward), ("backward", backward)):
        RATIOS.setdefault((label, dtype, "no mask" if name == "none" else "masks"), []).append(a / b)


def main():
    listed = compare_torch.listed
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", type=listed(), default=["bfloat16", "float32"])
    parser.add_argument("--head-dims", type=listed(int), default=[64, 128])
    parser.add_argument("--seqlens", type=listed(int), default=[1024, 2048])
    parser.add_argument("--seconds", type=float, default=0.5, help="to time each cell and pass for")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    RATIOS.clear()
    header = f"{'dtype':9} {'d':>4} {'s':>5} {'mask':8} | {'forward: torch, ours, ratio':24} | {'backward':24} | error"
    print(header, "-" * len(header), sep="\n")
    right = True
    for dtype in options.dtypes:
        for d in options.head_dims:
            for s in options.seqlens:
                right &= time_cell(dtype, d, s, options)
    for (label, dtype, kind), found in RATIOS.items():
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(f"{label:8} {dtype:9} {kind:8}: {mean:.2f} times PyTorch ({min(found):.2f} to {max(found):.2f}, {len(found)} cells)")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
