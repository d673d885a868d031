"""bench/compare_torch.py, masks_cpu.py, models_cpu.py and plot.py: what they find wrong, what they write, what they draw."""

import json
import sys

import pytest
from bench_support import load, run

plot = load("plot")


@pytest.fixture(scope="module")
def compare():
    pytest.importorskip("torch")
    return load("compare_torch")


SMALL = (
    "--seqlens",
    "48",
    "--head-dims",
    "16",
    "--heads",
    "2",
    "--decode-seqlen",
    "128",
    "--seconds",
    "0",
    "--turns",
    "2",
    "--threads",
    "1,2",
)


# ---- masks_cpu.py ----


def test_masks_are_timed_and_a_wrong_answer_is_told(monkeypatch, capsys):
    pytest.importorskip("torch")
    masks = load("masks_cpu")
    monkeypatch.setattr(sys, "argv", ["masks_cpu.py", "--dtypes", "float32", "--head-dims", "64", "--seqlens", "96", "--seconds", "0"])
    assert masks.main() == 0
    said = capsys.readouterr().out
    assert all(f" {name} " in said for name in masks.MASKS) and "WRONG" not in said
    assert "backward float32   masks    : " in said and ", 5 cells)" in said and "forward  float32   documents: " in said
    monkeypatch.setattr(masks, "ours", lambda q, k, v, attn_mask: masks.sdpa(q, k, v))  # forgets the mask
    assert masks.main() == 1
    assert capsys.readouterr().out.count("WRONG") == 5
    monkeypatch.setattr(sys, "argv", ["masks_cpu.py", "--masks", "documents,none,rows"])
    with pytest.raises(SystemExit):
        masks.main()


# ---- models_cpu.py ----


def test_models_are_timed_on_the_cpu(compare, monkeypatch, tmp_path, capsys):
    models, file = load("models_cpu"), tmp_path / "models.json"
    monkeypatch.setattr(models, "MODELS", {"cross": ("2", "16", 48, 9, False, 0), "causal": ("2", "16:8", 32, 32, True, 0), "grouped": ("4:2", "16", 40, 40, True, 0),
                                           "local": ("2", "16", 40, 40, True, 7), "large": ("64", "128", 8192, 8192, True, 0)})
    words = ("--dtypes", "float32", "--seconds", "0", "--json", file)
    assert run(models, monkeypatch, *words) == 0
    rows = json.loads(file.read_text())["rows"]
    found = [(row["seqlen_q"], row["seqlen_k"], row["heads"], row["heads_k"], row["head_dim_v"], row["causal"], row["pass"]) for row in rows]
    both = [(48, 9, 2, 2, 16, False), (32, 32, 2, 2, 8, True)]
    assert found == [(*shape, what) for shape in both for what in ("forward", "backward", "forward+backward")] + [(40, 40, 4, 2, 16, True, "inference")]
    said = capsys.readouterr().out
    assert "cross: 2 heads, 48 queries on 9 keys" in said and "5 cells of one pass: " in said and "0 wrong answers" in said and "large" not in said
    monkeypatch.setitem(models.TOLERANCE, "float32", 0.0)
    assert run(models, monkeypatch, *words, "--models", "cross") == 1
    assert "WRONG" in capsys.readouterr().out
    for wrong in (("--models", "local"), ("--dtypes", "int8")):
        with pytest.raises(SystemExit):
            run(models, monkeypatch, *wrong)


# ---- compare_torch.py ----


def test_every_pass_is_timed_and_appending_keeps_other_cells(compare, monkeypatch, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert run(compare, monkeypatch, *SMALL, "--dtypes", "float32", "--json", file) == 0
    first = json.loads(file.read_text())
    passes = {row["pass"] for row in first["rows"]}
    assert passes == {"forward", "backward", "forward+backward", "decode"}
    assert {row["threads"] for row in first["rows"]} == {1, 2}
    for row in first["rows"]:
        assert 0 < row["ours"]["min_ms"] <= row["ours"]["median_ms"] and row["turns"] == 2
        assert row["ratio_min"] == pytest.approx(row["torch"]["min_ms"] / row["ours"]["min_ms"])
        assert 0 <= row["ours"]["error"] <= 1e-5
    both = [
        r
        for r in first["rows"]
        if (r["threads"], r["causal"], r["tier"]) == (1, True, "auto") and r["pass"] != "decode"
    ]
    flops = {row["pass"]: row["flops"] for row in both}
    assert flops == {
        "forward": 4 * 48 * 48 / 2 * 16 * 2,
        "backward": 2.5 * flops["forward"],
        "forward+backward": 3.5 * flops["forward"],
    }

    again = (*SMALL, "--dtypes", "bfloat16", "--threads", "1", "--only", "decode", "--json", file, "--append")
    assert run(compare, monkeypatch, *again) == 0
    second = json.loads(file.read_text())
    assert second["rows"][: len(first["rows"])] == first["rows"] and {r["dtype"] for r in second["rows"]} == {
        "float32",
        "bfloat16",
    }
    count = len(second["rows"])
    assert run(compare, monkeypatch, *again) == 0
    assert len(json.loads(file.read_text())["rows"]) == count  # the same cells again take their places
    assert "WRONG" not in capsys.readouterr().out


def test_v_may_have_a_head_dim_of_its_own(compare, monkeypatch, tmp_path):
    file = tmp_path / "report.json"
    words = (*SMALL, "--head-dims", "24:16", "--dtypes", "float32", "--masks", "full", "--threads", "1", "--only", "training", "--json", file)
    assert run(compare, monkeypatch, *words) == 0
    report = json.loads(file.read_text())
    flops = {row["pass"]: row["flops"] for row in report["rows"] if row["tier"] == "auto"}
    heads = report["rows"][0]["heads"]
    assert flops["forward"] == 2 * 48 * 48 * (24 + 16) * heads
    assert flops["backward"] == pytest.approx(2 * 48 * 48 * (3 * 24 + 2 * 16) * heads)
    assert all("| 24:16 |" in line for line in list(plot.cells_table(report))[2:])


def test_rounds_add_turns_to_a_cell_and_no_rows(compare, monkeypatch, tmp_path):
    file = tmp_path / "report.json"
    words = (*SMALL, "--dtypes", "float32", "--masks", "full", "--threads", "1", "--only", "training", "--json", file)
    for rounds in (1, 3):
        assert run(compare, monkeypatch, *words, "--rounds", rounds) == 0
        rows = json.loads(file.read_text())["rows"]
        names = [(row["pass"], row["tier"]) for row in rows]
        assert len(set(names)) == len(names) and {row["turns"] for row in rows} == {2 * rounds}


def test_a_wrong_or_missing_result_is_found(compare):
    import torch

    torch.manual_seed(1)
    cell = compare.Cell("float32", 16, 40, 40, 2, 2, True, True)
    ours = compare.Ours(cell, 1, "auto")
    assert cell.wrong(cell.errors(ours.results)) is not None  # nothing has run: all is NaN
    assert cell.wrong_lse(ours.lse) is not None
    assert ours.wrong() is None
    for n, name in enumerate(("out", "dq", "dk", "dv")):
        kept = ours.results[n].clone()
        ours.results[n][0, cell.head, 0, 3] = float("nan")
        assert name in cell.wrong(cell.errors(ours.results))
        ours.results[n][:] = kept * (1 + 1e-4)
        assert name in cell.wrong(cell.errors(ours.results))
        ours.results[n][:] = kept
    ours.lse[0, cell.head, 7] += 1e-3
    assert cell.wrong_lse(ours.lse) is not None
    ours.close()


def test_a_wrong_answer_is_not_timed_and_makes_the_exit_status_1(compare, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(compare.TOLERANCE, "float32", 1e-12)  # what float32 cannot reach
    file = tmp_path / "report.json"
    assert run(compare, monkeypatch, *SMALL, "--dtypes", "float32", "--only", "decode", "--json", file) == 1
    assert "WRONG" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"] == []


def test_words_that_mean_nothing_are_refused(compare, monkeypatch):
    for words in (("--dtypes", "float64"), ("--masks", "some"), ("--tiers", "sse")):
        with pytest.raises(SystemExit):
            run(compare, monkeypatch, *words)


@pytest.mark.parametrize("dtype, kernel, says", [
    ("float32", "forward_avx512", "50.0     -"), ("float32", "forward_amx", "50.0  25.0"), ("bfloat16", "forward_amx", "-  25.0"),
    ("bfloat16", "forward_avx512-bf16", "-  12.5"), ("bfloat16", "forward_avx512", "50.0     -")])
def test_percentages_are_of_what_the_kernel_multiplies_with(compare, capsys, dtype, kernel, says):
    row = {**cpu_report()["rows"][0], "dtype": dtype, "kernel": kernel, "ours": {"min_ms": 2.0, "median_ms": 2.0}, "torch": None}
    compare.show(row, row["peaks"])  # 500 GFLOP/s
    assert f" {says} |" in capsys.readouterr().out
    assert "%BF16" in compare.header("avx512-bf16") and "%AMX" in compare.header("amx-fp16")


# ---- plot.py ----


def gpu_report():
    tflops = {"ours": 300.0, "flash": 200.0, "cudnn": "WRONG 3e-01", "math": None}
    rows = [
        {"pass": label, "head_dim": 64, "causal": causal, "seqlen": s, "tflops": tflops}
        for label in ("forward", "backward")
        for causal in (False, True)
        for s in (512, 1024)
    ]
    rows[-1] = {**rows[-1], "tflops": {"ours": 100.0, "flash": None}}
    return {"schema": "flashattn-gpu-bench-1", "card": "NVIDIA H200, 580, 1980 MHz", "torch": "2.11", "rows": rows}


def cpu_report():
    def row(label, dtype, s, tier, ours, torch, kernel=None):
        found = {
            "pass": label,
            "dtype": dtype,
            "head_dim": 64,
            "heads": 8,
            "heads_k": 8,
            "seqlen_k": s,
            "causal": False,
        }
        found |= {"threads": 1, "tier": tier, "flops": 1e9, "kv_bytes": 1e6, "ours": {"min_ms": ours}}
        found["torch"] = torch and {"min_ms": torch}
        found["ratio_min"] = found["ratio_median"] = torch and torch / ours
        found["kernel"] = kernel or (
            "decode_avx512" if label == "decode" else "forward_amx" if dtype == "bfloat16" else "forward_avx512"
        )
        found["peaks"] = {"read_gbps": 10.0, "fma_gflops": 1000.0, "amx_gflops": 2000.0, "bf16_gflops": 4000.0}
        return found

    return {
        "schema": "flashattn-torch-bench-1",
        "cpu": {"name": "A processor"},
        "torch": "2.11",
        "rows": [
            row("forward", "float32", 1024, "auto", 2.0, 4.0),
            row("forward", "float32", 1024, "avx512", 3.0, 4.0),
            row("forward", "float32", 2048, "auto", 4.0, None),
            row("forward", "bfloat16", 1024, "auto", 1.0, 4.0),
            row("forward", "float16", 1024, "auto", 2.0, 4.0),
            row("forward", "float16", 1024, "amx-fp16", 1.0, 4.0),
            row("decode", "bfloat16", 32768, "auto", 0.2, 0.4),
        ],
    }


def test_gpu_bars_are_what_the_report_says():
    figures = plot.figures_of(gpu_report())
    assert list(figures) == ["gpu-forward", "gpu-backward", "gpu-both"]
    first, second = figures["gpu-both"]["panels"]
    assert first["groups"] == ["512", "1024"] and list(first["bars"]) == ["flash", "ours"]  # wrong or missing: no bar
    assert first["bars"]["ours"] == pytest.approx([300.0, 300.0])
    assert second["bars"]["ours"][1] == pytest.approx(3.5 / (1 / 300 + 2.5 / 100))  # work over the sum of both times
    assert second["bars"]["flash"][1] is None
    assert "H200" in figures["gpu-both"]["title"] and "580" not in figures["gpu-both"]["title"]


def test_cpu_bars_are_what_the_report_says():
    figures = plot.figures_of(cpu_report())
    assert list(figures) == ["cpu-forward-1", "decode"]
    floats, halves, two_halves = figures["cpu-forward-1"]["panels"]
    assert floats["bars"] == {
        "torch": [250.0, None],
        "ours, AMX off": [pytest.approx(1000 / 3), None],
        "ours": [500.0, 250.0],
    }
    assert list(halves["bars"]) == ["torch", "ours"]
    assert two_halves["bars"] == {"torch": [250.0], "ours, AMX-FP16": [1000.0], "ours": [500.0]}
    assert figures["decode"]["panels"][0]["bars"] == {"torch": [2.5], "read": [10.0], "ours": [5.0]}


def test_tables_say_what_the_report_says(monkeypatch, tmp_path, capsys):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(cpu_report()))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(file), "--table", "summary"])
    assert plot.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | 1 thread |" and len(lines) == 2 + 6
    assert lines[2] == "| float32 forward | **2.00x** (2.00-2.00), 500 GFLOP/s, 50% of FMA |"
    assert lines[3] == "| float32 forward, AMX off | **1.33x** (1.33-1.33), 333 GFLOP/s, 33% of FMA |"
    assert lines[6] == "| float16 forward, AMX-FP16 | **4.00x** (4.00-4.00), 1000 GFLOP/s, 100% of FMA |"
    assert lines[7] == "| bfloat16 decode | **2.00x** (2.00-2.00), 5.0 GB/s, 50% of reading |"
    monkeypatch.setattr(sys, "argv", ["plot.py", str(file), "--table", "cells"])
    assert plot.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 7
    assert lines[5] == "| bfloat16 forward | 64 | none | 1024 | 1 | 250 | 1000 | 4.00 | 4.00 | 50% of AMX |"


def test_tables_of_a_gpu_say_what_the_report_says(monkeypatch, tmp_path, capsys):
    file = tmp_path / "report.json"
    report = gpu_report()
    report["rows"][0] = {**report["rows"][0], "tflops": {"ours": 100.0, "flash": 400.0}}
    file.write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(file), "--table", "summary"])
    assert plot.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | TFLOP/s | PyTorch standard | PyTorch FlashAttention-2 | cuDNN |" and len(lines) == 2 + 2
    assert lines[2] == "| forward, 64 | 100-300 | - | **0.96x** (0.25-1.50; 1 of 4 below 1) | - |"  # (1/4 * 3/2 ** 3) ** (1/4)
    assert lines[3] == "| backward, 64 | 100-300 | - | **1.50x** (1.50-1.50) | - |"  # a peer that is wrong or missing has no ratio
    monkeypatch.setattr(sys, "argv", ["plot.py", str(file), "--table", "cells"])
    assert plot.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8
    assert lines[2] == "| forward | 64 | no | 512 | 100 | - | 400 | - | - | 0.25 | - |"
    assert lines[-1] == "| backward | 64 | yes | 1024 | 100 | - | - | - | - | - | - |"


@pytest.mark.parametrize("kernel, says", [
    ("forward_avx512-bf16", "25% of BF16"), ("forward_avx512", "100% of FMA"), ("forward_amx-fp16", "50% of AMX"), ("backward_neon-bf16", "100% of FMA")])
def test_a_share_is_of_what_the_kernel_multiplies_with(kernel, says):
    report = cpu_report()
    row = {**report["rows"][3], "kernel": kernel}
    assert plot.share(row, report) == says


def test_a_file_that_is_no_report_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="schema"):
        plot.figures_of({"schema": "something else", "rows": []})
    file = tmp_path / "report.json"
    file.write_text("{")
    monkeypatch.setattr(sys, "argv", ["plot.py", str(file)])
    with pytest.raises(SystemExit, match="report.json"):
        plot.main()


@pytest.mark.parametrize("report", [gpu_report, cpu_report])
def test_pictures_are_drawn_and_repeat(report, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report()))
    for folder in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["plot.py", str(file), "--out", str(tmp_path / folder)])
        assert plot.main() == 0
    for name, figure in plot.figures_of(report()).items():
        picture = (tmp_path / "one" / f"{name}.svg").read_text()
        assert (tmp_path / "two" / f"{name}.svg").read_text() == picture
        assert (tmp_path / "one" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        for panel in figure["panels"]:
            for value in [v for values in panel["bars"].values() for v in values if v]:
                assert (f">{value:.0f}<" in picture) or (f">{value:.1f}<" in picture)
