#!/usr/bin/env python3
"""Compare texts of the GPU kernels on one GPU: folders whose files take the place of those in src/cuda/kernels (FLASH_ATTN_KERNEL_DIR).

    make && python3 bench/variants.py --passes backward --cells 128c2048,64n512 before=FOLDER now=src/cuda/kernels [--cycles] [--fa3 LIBRARY] [--fp8] [--float32] [--varlen] [--window 1024] [--heads 32:8] [--tokens 16384]

A cell is a head_dim (192:128: V has its own), c (causal) or n (no mask) and a length; bfloat16, or with --fp8 the forward's FP8 inputs, hidden dimension 2048, 16384 tokens, as in gpu.py, which has the last six options too. TFLOP/s by turns, each answer compared
with float64 on one head first; WRONG makes the exit status 1. They move by 3% from minute to minute on a card at its power limit: with --cycles Nsight Compute (ncu)
counts the cycles of one call instead, which repeat within 0.5%: those of its longest kernel and, in brackets, of the small ones beside it, in millions. Clocks are
left as they are. One folder alone has no peer: the texts of the library itself are NAME= without a folder.
"""

import argparse
import csv
import os
import pathlib
import re
import subprocess
import sys

CELL = r"(\d+(?::\d+)?)([cn])(\d+)"
COUNTED = "FLASHATTN_VARIANTS_COUNTED"  # set where this program runs under ncu
METRIC, MARK = "sm__cycles_elapsed.max", "spin_kernel"  # torch.cuda._sleep's: it stands between two calls


def groups_of(rows):
    """[(the longest kernel's cycles, the others')] of each call, from ncu's rows of (kernel, cycles)."""
    groups = []
    for kernel, cycles in rows:
        if MARK in kernel:
            groups.append([])
        elif groups:
            groups[-1].append(cycles)
    return [(max(group), sum(group) - max(group)) for group in groups]


def rows_of(lines):
    """(kernel, cycles) of each launch, from the lines of ncu's --csv log, where its own messages stand too."""
    return [(row["Kernel Name"], float(row["Metric Value"].replace(",", ""))) for row in csv.DictReader(line for line in lines if line.startswith('"'))]


def count_cycles(names, cells):
    log = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"flashattn-variants-{os.getpid()}.csv"
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--metrics", METRIC, "--csv", "--print-units", "base",
               "--log-file", str(log), sys.executable, *sys.argv]
    try:
        subprocess.run(command, env={**os.environ, COUNTED: "1"}, check=True)
        counted = groups_of(rows_of(log.read_text().splitlines()))
    finally:
        log.unlink(missing_ok=True)
    print(f"{'cell':10}" + "".join(f"{name:>18}" for name in names) + "   million cycles")
    for n, cell in enumerate(cells):
        print(f"{cell:10}" + "".join(f"{main / 1e6:9.3f} (+{rest / 1e6:5.3f})" for main, rest in counted[n * len(names) : (n + 1) * len(names)]))


def context_of(card, folder):
    """A context with the texts of `folder`; its CUDA part reads them at its first call."""
    small = card.torch.zeros(1, 16, 1, 64, device=card.DEVICE, dtype=card.torch.bfloat16)
    os.environ["FLASH_ATTN_KERNEL_DIR"] = os.path.abspath(folder) if folder else ""
    call = card._call.Call(small, small, small)
    call.context = card.new_context()
    call.forward(card.torch.empty_like(small))
    return call.context


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--cells", default="64c2048,64n2048,128c2048,128n2048,256c2048,256n2048")
    parser.add_argument("--passes", choices=["forward", "backward"], default="forward")
    parser.add_argument("--groups", type=int, default=5, help="timed groups of launches")
    parser.add_argument("--cycles", action="store_true", help="count cycles by Nsight Compute")
    parser.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3 too: see fa3.py")
    parser.add_argument("--fp8", action="store_true", help="FP8 inputs; forward only, without FlashAttention-3")
    parser.add_argument("--float32", action="store_true", help="float32 in place of bfloat16")
    parser.add_argument("--varlen", action="store_true", help="packed sequences")
    parser.add_argument("--window", type=int, help="keys that a query sees")
    parser.add_argument("--heads", help="of each cell, of Q and of K and V")
    parser.add_argument("--tokens", type=int, help="of each cell")
    options = parser.parse_args()
    cells = options.cells.split(",")
    if any(not re.fullmatch(CELL, cell) for cell in cells) or any("=" not in v for v in options.variants):
        parser.error("a cell is like 128c2048, a variant NAME=FOLDER")
    if options.float32 and (options.fa3 or options.fp8 or options.varlen or options.window):
        parser.error("--float32 is without --fa3, --fp8, --varlen and --window")
    if options.fp8 and (options.fa3 or options.passes == "backward"):
        parser.error("--fp8 has neither a backward nor --fa3")
    folders = dict(v.split("=", 1) for v in options.variants)
    names = [*folders, *(["fa3"] if options.fa3 else [])]
    if options.cycles and COUNTED not in os.environ:
        count_cycles(names, cells)
        return 0

    import card  # first: it finds the library
    import fa3
    import gpu
    import head_dims
    import torch

    if not card.present():
        print("skipped: no CUDA device that PyTorch can use")
        return 0
    if options.fa3:
        fa3.load(options.fa3)
    contexts = {name: context_of(card, folder) for name, folder in folders.items()}
    switches = [f"--{name}" for name in ("fp8", "varlen", "float32") if getattr(options, name)]
    plain = gpu.parse(switches + [f"--{name}={getattr(options, name)}" for name in ("window", "heads", "tokens") if getattr(options, name) is not None])
    made, bound = (gpu.fp8, 5e-2) if options.fp8 else (gpu.ours, None)
    backward, wrong = options.passes == "backward", 0
    torch.manual_seed(0)
    if not options.cycles:
        print(f"{'cell':10}" + "".join(f"{name:>10}" for name in names) + "   TFLOP/s", flush=True)
    for text in cells:
        dims, mask, seqlen = re.fullmatch(CELL, text).groups()
        d, d_v = head_dims.widths(dims)
        cell = gpu.Cell(d, int(seqlen), mask == "c", plain, d_v)
        runs = {name: (fa3.peer(cell) if name == "fa3" else made(cell, contexts[name]))[backward] for name in names}
        if options.cycles:
            for run in runs.values():
                run()  # kernels are built
                torch.cuda.profiler.start()
                torch.cuda._sleep(1)
                run()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
            continue
        bad = [name for name, run in runs.items() if cell.wrong(run(), 1 if backward else 0, bound) is not None]
        times = card.time_by_turns(runs, options.groups)
        wrong += len(bad)
        print(f"{text:10}" + "".join(f"{'WRONG' if name in bad else format(cell.flops(backward) / ms / 1e9, '.1f'):>10}" for name, ms in times.items()), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
