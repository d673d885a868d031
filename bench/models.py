#!/usr/bin/env python3
"""Time the attention of well-known models on one GPU, ours beside PyTorch's and FlashAttention-3's, and check every answer.

    make && python3 bench/models.py [--models vit,llama] [--passes forward] [--tokens 16384] [--fa3 LIBRARY] [--groups 5] [--json FILE]

bfloat16, as many sequences as have 16384 queries in all, at least one. The shapes are those of the models' published configurations: heads (query heads on key
heads), head_dim (and V's own), queries and keys of a sequence at the resolution or length that is named, and the mask; cross attention, of text or of an image, has
few keys. --models takes those whose names begin so. TFLOP/s, peers, answers and times are gpu.py's.
"""

import argparse
import sys

import card  # first: it finds the library
import gpu
import head_dims

# name: (heads, head_dim, queries, keys, causal, window)
MODELS = {
    "vit-b16 224": ("12", "64", 197, 197, False, 0),
    "vit-b16 384": ("12", "64", 577, 577, False, 0),
    "clip-l14 224": ("16", "64", 257, 257, False, 0),
    "clip-l14 text": ("12", "64", 77, 77, True, 0),
    "siglip-so400m 384": ("16", "72", 729, 729, False, 0),
    "dinov2-g14 518": ("24", "64", 1370, 1370, False, 0),
    "detr decoder": ("8", "32", 100, 850, False, 0),
    "blip2 q-former": ("12", "64", 32, 257, False, 0),
    "bert-base 128": ("12", "64", 128, 128, False, 0),
    "bert-base 512": ("12", "64", 512, 512, False, 0),
    "esm2-3b 1024": ("40", "64", 1024, 1024, False, 0),
    "whisper-large encoder": ("20", "64", 1500, 1500, False, 0),
    "whisper-large cross": ("20", "64", 448, 1500, False, 0),
    "sd1.5 512 level 1": ("8", "40", 4096, 4096, False, 0),
    "sd1.5 512 level 1 cross": ("8", "40", 4096, 77, False, 0),
    "sd1.5 512 level 2": ("8", "80", 1024, 1024, False, 0),
    "sd1.5 512 level 3": ("8", "160", 256, 256, False, 0),
    "sdxl 1024 level 2": ("10", "64", 4096, 4096, False, 0),
    "sdxl 1024 level 2 cross": ("10", "64", 4096, 77, False, 0),
    "sdxl 1024 level 3": ("20", "64", 1024, 1024, False, 0),
    "sdxl 1024 level 3 cross": ("20", "64", 1024, 77, False, 0),
    "pixart 1024 cross": ("16", "72", 4096, 300, False, 0),
    "flux 1024": ("24", "128", 4608, 4608, False, 0),
    "wan2.1-14b 480p": ("40", "128", 32760, 32760, False, 0),
    "wan2.1-14b 480p cross": ("40", "128", 32760, 512, False, 0),
    "gpt2-xl 1024": ("25", "64", 1024, 1024, True, 0),
    "phi3-mini 4096": ("32", "96", 4096, 4096, True, 0),
    "mistral-7b 8192": ("32:8", "128", 8192, 8192, True, 4096),
    "llama3-8b 2048": ("32:8", "128", 2048, 2048, True, 0),
    "llama3-8b 8192": ("32:8", "128", 8192, 8192, True, 0),
    "llama3-70b 8192": ("64:8", "128", 8192, 8192, True, 0),
    "qwen3-0.6b 4096": ("16:8", "128", 4096, 4096, True, 0),
    "gemma3-4b 8192 local": ("8:4", "256", 8192, 8192, True, 1024),
    "gemma3-4b 8192 global": ("8:4", "256", 8192, 8192, True, 0),
    "gpt-oss-20b 4096 local": ("64:8", "64", 4096, 4096, True, 128),
    "deepseek-v3 4096": ("128", "192:128", 4096, 4096, True, 0),
}


def cell_of(shape, tokens):
    heads, d, queries, keys, causal, window = shape
    options = gpu.parse([f"--heads={heads}", f"--tokens={tokens}", f"--window={window}"])
    d, d_v = head_dims.widths(d)
    return gpu.Cell(d, queries, causal, options, d_v, keys)


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="beginnings of names, between commas; all")
    parser.add_argument("--passes", choices=["forward", "backward", "both"], default="both")
    parser.add_argument("--tokens", type=int, default=gpu.TOKENS)
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(words)
    options.chosen = {name: shape for name, shape in MODELS.items() if name.startswith(tuple(options.models.split(",")))}
    if not options.chosen:
        parser.error(f"--models {options.models}: expected beginnings of {', '.join(MODELS)}")
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
        cell = cell_of(shape, options.tokens)
        without = {"efficient"} if cell.grouped or window else set()
        runs = gpu.runs_of(cell, [n for n in names if n not in without | ({"cudnn"} if window else set())])
        for backward in {"forward": [False], "backward": [True], "both": [False, True]}[options.passes]:
            row = gpu.bench_pass(cell, backward, runs, options.groups)
            best = max((x for n, x in row.items() if isinstance(x, float) and n != "ours"), default=None)
            over = row["ours"] / best if best and isinstance(row["ours"], float) else None
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
