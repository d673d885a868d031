#!/usr/bin/env python3
"""Draw a benchmark's JSON as grouped bars, like the figures of the FlashAttention papers.

    python3 bench/plot.py FILE [--out FOLDER] [--only NAME,...] [--list | --table summary | --table cells]

FILE is what bench/compare_torch.py --json or bench/gpu.py --json wrote. Each figure becomes FOLDER/NAME.svg and
NAME.png; --list prints the names, --table a Markdown table and draws nothing. From
compare_torch.py: cpu-PASS-THREADS, and decode; from gpu.py: gpu-forward, gpu-backward and gpu-both, the
FlashAttention-2 paper's Figures 5, 6 and 4 (7 on Hopper). Forward and backward together count 3.5 forwards in the sum
of both times. Needs matplotlib.
"""

import argparse
import json
import pathlib
import statistics
import sys

import head_dims

# In the order of the bars: the name in the data, what the legend says, the colour.
SERIES = {
    "math": ("PyTorch standard", "#b8c4d6"),
    "efficient": ("PyTorch efficient", "#e8b96a"),
    "flash": ("PyTorch FlashAttention-2", "#7da7d9"),
    "cudnn": ("cuDNN", "#8bbf8b"),
    "fa3": ("FlashAttention-3", "#4b5f9e"),
    "flex": ("FlexAttention", "#b79bd0"),
    "torch": ("PyTorch SDPA", "#7da7d9"),
    "read": ("plain read of memory", "#c9c9c9"),
    "ours, AMX off": ("flashattn, AMX off", "#e8a09a"),
    "ours, AMX-FP16": ("flashattn, AMX-FP16", "#7b241c"),
    "ours": ("flashattn", "#c0392b"),
}
SPARE_COLOURS = ("#8c8c8c", "#5f9ea0", "#d2691e")


# ---- from a report to figures: plain data,
# {name: {title, unit, groups, columns, panels: [{title, groups, bars: {series: [value]}}]}} ----


def panel(title, groups, bars):
    """Series without a single value are left out."""
    return {
        "title": title,
        "groups": [str(g) for g in groups],
        "bars": {name: values for name, values in bars.items() if any(v is not None for v in values)},
    }


def gpu_speed(row_pair, name):
    """TFLOP/s of a series in {pass: row}; of both passes together where both are asked for."""
    speeds = [row["tflops"].get(name) if row else None for row in row_pair]
    if not all(isinstance(s, (int, float)) and s > 0 for s in speeds):  # None: no kernel; text: a wrong answer
        return None
    share = head_dims.backward_share(head_dims.of_row(row_pair[0]))
    return speeds[0] if len(speeds) == 1 else (1 + share) / (1 / speeds[0] + share / speeds[1])


def gpu_figures(report):
    rows = {(r["pass"], head_dims.of_row(r), r["causal"], r["seqlen"]): r for r in report["rows"]}
    dims, lengths = ([*sorted({key[n] for key in rows})] for n in (1, 3))
    names = ordered({name for row in rows.values() for name in row["tflops"]})
    card = report["card"].split(",")[0]
    figures = {}
    for label, passes, title in (
        ("forward", ["forward"], "forward"),
        ("backward", ["backward"], "backward"),
        ("both", ["forward", "backward"], "forward and backward"),
    ):
        panels = []
        for d in dims:
            for causal in (False, True):
                bars = {
                    name: [gpu_speed([rows.get((p, d, causal, s)) for p in passes], name) for s in lengths]
                    for name in names
                }
                panels.append(panel(f"{'causal' if causal else 'no mask'}, head dim {head_dims.title(d)}", lengths, bars))
        figures[f"gpu-{label}"] = {
            "title": f"Attention {title}, bfloat16, {card}",
            "unit": "TFLOP/s",
            "groups": "sequence length",
            "columns": 2,
            "panels": panels,
        }
    return figures


def cpu_series(row):
    return (
        "ours, AMX off"
        if row["dtype"] == "float32" and row["tier"] == "avx512"
        else "ours" if row["tier"] == "auto" else f"ours, {row['tier'].upper()}"
    )


def cpu_panel(rows, dtype, dims, causal):
    chosen = [r for r in rows if (r["dtype"], head_dims.of_row(r), r["causal"]) == (dtype, dims, causal)]
    lengths = sorted({r["seqlen_k"] for r in chosen})
    found = {}
    for row in chosen:
        for name, side in ((cpu_series(row), row["ours"]), ("torch", row["torch"])):
            if side:
                found[name, row["seqlen_k"]] = row["flops"] / side["min_ms"] / 1e6
    bars = {name: [found.get((name, s)) for s in lengths] for name in ordered({name for name, _ in found})}
    return panel(f"{dtype}, head dim {head_dims.title(dims)}, {'causal' if causal else 'no mask'}", lengths, bars)


def decode_figure(rows, cpu):
    panels = []
    for threads in sorted({r["threads"] for r in rows}):
        chosen = [r for r in rows if r["threads"] == threads and r["tier"] != "amx-fp16"]
        bars = {
            "torch": [r["torch"] and r["kv_bytes"] / r["torch"]["min_ms"] / 1e6 for r in chosen],
            "read": [r["peaks"]["read_gbps"] or None for r in chosen],
            "ours": [r["kv_bytes"] / r["ours"]["min_ms"] / 1e6 for r in chosen],
        }
        panels.append(panel(f"{threads} thread{'s' if threads > 1 else ''}", [r["dtype"] for r in chosen], bars))
    one = rows[0]
    shape = f"{one['heads']} query heads on {one['heads_k']}, {one['seqlen_k']} keys, head dim {one['head_dim']}"
    return {"title": f"Decode: {shape}; {cpu}", "unit": "GB/s of K and V", "groups": "", "columns": 2, "panels": panels}


def cpu_figures(report):
    figures = {}
    cpu = report["cpu"]["name"]
    for label in ("forward", "backward", "forward+backward"):
        for threads in sorted({r["threads"] for r in report["rows"]}):
            rows = [r for r in report["rows"] if (r["pass"], r["threads"]) == (label, threads)]
            dtypes, dims = list(dict.fromkeys(r["dtype"] for r in rows)), {head_dims.of_row(r) for r in rows}
            panels = [
                cpu_panel(rows, dtype, d, causal) for dtype in dtypes for d in sorted(dims) for causal in (False, True)
            ]
            panels = [p for p in panels if p["bars"]]
            if panels:
                figures[f"cpu-{label.replace('forward+backward', 'both')}-{threads}"] = {
                    "title": f"Attention {label.replace('+', ' and ')}, {threads} thread{'s' if threads > 1 else ''}, {cpu}",
                    "unit": "GFLOP/s",
                    "groups": "sequence length",
                    "columns": min(4, len(panels)),
                    "panels": panels,
                }
    decode = [r for r in report["rows"] if r["pass"] == "decode"]
    if decode:
        figures["decode"] = decode_figure(decode, cpu)
    return figures


# ---- tables ----


def speed_of(row, side):
    """GFLOP/s, for decode GB/s, of a row's fastest run."""
    return (row["kv_bytes"] if row["pass"] == "decode" else row["flops"]) / row[side]["min_ms"] / 1e6


def share(row, report):
    """What part of the chip's peak ours reaches: of reading memory, AMX or AVX512_BF16 products or multiply-adds. The
    peak is the best of all rows at as many threads, for a report may be of several runs."""
    multiplies = {"amx": "amx_gflops", "avx512-bf16": "bf16_gflops"}
    kinds = [kind for name, kind in multiplies.items() if name in row["kernel"]] or ["fma_gflops"]
    kind = "read_gbps" if row["pass"] == "decode" else kinds[0]
    alike = [r for r in report["rows"] if r["threads"] == row["threads"]]
    if kind == "read_gbps":
        alike = [r for r in alike if r["pass"] == "decode"]  # others' K and V lie in a cache
    peak = max((r["peaks"].get(kind, 0) for r in alike), default=0)
    name = {"read_gbps": "reading", "amx_gflops": "AMX", "bf16_gflops": "BF16", "fma_gflops": "FMA"}[kind]
    return f"{100 * speed_of(row, 'ours') / peak:.0f}% of {name}" if peak else "-"


def title_of(row):
    return f"{row['dtype']} {row['pass']}{cpu_series(row).removeprefix('ours')}"


def gpu_cells(report):
    """[(row, {series: TFLOP/s or None})] of gpu.py's report, in the order of passes, head dims, masks and lengths."""
    rows = sorted(report["rows"], key=lambda r: (r["pass"] != "forward", head_dims.of_row(r), r["causal"], r["seqlen"]))
    return [(row, {name: gpu_speed([row], name) for name in row["tflops"]}) for row in rows]


def times_as_fast(cells, peer):
    """Ours to a peer's, where both are right."""
    return [speeds["ours"] / speeds[peer] for _, speeds in cells if speeds.get("ours") and speeds.get(peer)]


def gpu_peers(report):
    return [name for name in ordered({name for row in report["rows"] for name in row["tflops"]}) if name != "ours"]


def gpu_summary_table(report):
    """A line for each pass and head_dim: TFLOP/s, least to most, and the ratio to each peer over masks and lengths (geometric mean, least to
    most, and how many cells are below 1)."""
    peers = gpu_peers(report)
    yield "| | TFLOP/s | " + " | ".join(SERIES.get(name, (name,))[0] for name in peers) + " |"
    yield "|---" * (len(peers) + 2) + "|"
    groups = {}
    for cell in gpu_cells(report):
        groups.setdefault((cell[0]["pass"], head_dims.of_row(cell[0])), []).append(cell)
    for (label, dims), cells in groups.items():
        ours = [speeds["ours"] for _, speeds in cells if speeds.get("ours")]
        line = [f"{label}, {head_dims.title(dims)}", f"{min(ours):.0f}-{max(ours):.0f}" if ours else "-"]
        for peer in peers:
            ratios = times_as_fast(cells, peer)
            below = sum(ratio < 1 for ratio in ratios)
            line.append(f"**{statistics.geometric_mean(ratios):.2f}x** ({min(ratios):.2f}-{max(ratios):.2f}{f'; {below} of {len(ratios)} below 1' if below else ''})"
                        if ratios else "-")
        yield "| " + " | ".join(line) + " |"


def gpu_cells_table(report):
    peers = gpu_peers(report)
    yield "| | d | causal | s | ours | " + " | ".join(peers) + " | " + " | ".join(f"ours / {peer}" for peer in peers) + " |"
    yield "|---" * (5 + 2 * len(peers)) + "|"
    for row, speeds in gpu_cells(report):
        line = [row["pass"], head_dims.title(head_dims.of_row(row)), "yes" if row["causal"] else "no", row["seqlen"]]
        line += [f"{speeds[name]:.0f}" if speeds.get(name) else "-" for name in ("ours", *peers)]
        line += [f"{ratio[0]:.2f}" if (ratio := times_as_fast([(row, speeds)], peer)) else "-" for peer in peers]
        yield "| " + " | ".join(map(str, line)) + " |"


def summary_table(report):
    """A line for each dtype and pass; for each number of threads the ratio to PyTorch over the grid (geometric mean, least
    to most) and the fastest cell."""
    threads = sorted({row["threads"] for row in report["rows"]})
    groups = {}
    for row in report["rows"]:
        groups.setdefault(title_of(row), {}).setdefault(row["threads"], []).append(row)
    yield "| | " + " | ".join(f"{t} thread{'s' if t > 1 else ''}" for t in threads) + " |"
    yield "|---" * (len(threads) + 1) + "|"
    for title, found in groups.items():
        cells = []
        for t in threads:
            ratios = [row["ratio_min"] for row in found.get(t, []) if row["ratio_min"]]
            best = max(found.get(t, []), key=lambda row: speed_of(row, "ours"), default=None)
            unit = "GB/s" if title.split()[1].rstrip(",") == "decode" else "GFLOP/s"
            times = (
                f"**{statistics.geometric_mean(ratios):.2f}x** ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
            )
            cells.append(
                f"{times}, {speed_of(best, 'ours'):.{1 if unit == 'GB/s' else 0}f} {unit}, {share(best, report)}"
                if best
                else "-"
            )
        yield f"| {title} | " + " | ".join(cells) + " |"


def cells_table(report):
    yield "| | d | mask | length | threads | PyTorch | flashattn | ratio | of medians | of the peak |"
    yield "|---" * 10 + "|"
    for row in sorted(report["rows"], key=lambda r: (r["threads"], r["pass"] == "decode")):
        if row["pass"] == "forward+backward":
            continue
        theirs = f"{speed_of(row, 'torch'):.{1 if row['pass'] == 'decode' else 0}f}" if row["torch"] else "-"
        ratios = [f"{row[name]:.2f}" if row[name] else "-" for name in ("ratio_min", "ratio_median")]
        yield (
            f"| {title_of(row)} | {head_dims.title(head_dims.of_row(row))} | {'causal' if row['causal'] else 'none'} | {row['seqlen_k']} | "
            f"{row['threads']} | {theirs} | {speed_of(row, 'ours'):.{1 if row['pass'] == 'decode' else 0}f} | "
            f"{ratios[0]} | {ratios[1]} | {share(row, report)} |"
        )


def ordered(names):
    known = list(SERIES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else known.index("flex"), name))


def figures_of(report):
    makers = {"flashattn-torch-bench-1": cpu_figures, "flashattn-gpu-bench-1": gpu_figures}
    if report.get("schema") not in makers:
        raise ValueError(f"schema {report.get('schema')!r}: expected one of {', '.join(makers)}")
    return makers[report["schema"]](report)


# ---- drawing ----


def draw_panel(axes, one, unit, look):
    count = len(one["bars"])
    width = 0.84 / max(count, 1)
    top = max((v for values in one["bars"].values() for v in values if v), default=1)
    for n, (name, values) in enumerate(one["bars"].items()):
        for group, value in enumerate(values):
            if value is None:
                continue
            at = group + (n - (count - 1) / 2) * width
            axes.bar(at, value, width * 0.94, color=look[name][1], label=look[name][0])
            axes.text(
                at,
                value + top * 0.012,
                f"{value:.0f}" if top >= 20 else f"{value:.1f}",
                ha="center",
                va="bottom",
                fontsize=5.2,
            )
    axes.set_xticks(range(len(one["groups"])), one["groups"], fontsize=7)
    axes.set_ylim(0, top * 1.12)
    axes.set_title(one["title"], fontsize=9)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def draw(figure, paths):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "flashattn", "svg.fonttype": "none"}
    )  # the same data give the same file
    import matplotlib.pyplot as plt

    panels, columns = figure["panels"], min(figure["columns"], len(figure["panels"]))
    lines = -(-len(panels) // columns)
    widest = max(len(p["groups"]) * (len(p["bars"]) + 1) for p in panels)
    shown, axes = plt.subplots(
        lines,
        columns,
        figsize=(max(7.0, columns * max(2.6, 0.2 * widest)), 0.7 + 2.1 * lines),
        squeeze=False,
        layout="constrained",
    )
    names = ordered({name for p in panels for name in p["bars"]})
    spare = iter(SPARE_COLOURS * len(names))
    look = {name: SERIES.get(name) or (name, next(spare)) for name in names}
    for place, one in zip(axes.flat, panels):
        draw_panel(place, one, figure["unit"], look)
    for place in axes[-1]:
        place.set_xlabel(figure["groups"], fontsize=8)
    for place in axes.flat[len(panels) :]:
        place.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, color=look[name][1]) for name in names]
    shown.legend(
        handles,
        [look[name][0] for name in names],
        loc="outside lower center",
        ncols=len(names),
        fontsize=8,
        frameon=False,
    )
    shown.suptitle(figure["title"], fontsize=10)
    for path in paths:
        shown.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), metavar="FOLDER")
    parser.add_argument("--only", metavar="NAME,...", help="these figures alone")
    parser.add_argument("--list", action="store_true", help="print the names of the figures and draw nothing")
    parser.add_argument("--table", choices=("summary", "cells"), help="a Markdown table instead of pictures")
    options = parser.parse_args()
    try:
        report = json.loads(options.file.read_text())
        figures = figures_of(report)
    except (OSError, ValueError) as problem:
        sys.exit(f"plot: {options.file}: {problem}")
    if options.table:
        of_gpu = report["schema"] == "flashattn-gpu-bench-1"
        tables = {"summary": (summary_table, gpu_summary_table), "cells": (cells_table, gpu_cells_table)}
        print(*tables[options.table][of_gpu](report), sep="\n")
        return 0
    wanted = options.only.split(",") if options.only else list(figures)
    for name in wanted:
        if name not in figures:
            sys.exit(f"plot: no figure '{name}' in {options.file}; there are {', '.join(figures)}")
        if options.list:
            print(name)
            continue
        options.out.mkdir(parents=True, exist_ok=True)
        draw(figures[name], [options.out / f"{name}.svg", options.out / f"{name}.png"])
        print(options.out / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
