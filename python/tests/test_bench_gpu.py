"""bench/gpu.py and what stands on it: what needs no GPU."""

import argparse
import importlib
import json
import math
import os
import sys
import time

import pytest
from bench_support import load, run

plot = load("plot")


@pytest.fixture
def gpu(monkeypatch):
    """bench/gpu.py on the CPU at a tiny size: its clock, its card and its device are another's, the rest is its own."""
    pytest.importorskip("torch")
    monkeypatch.setitem(os.environ, "FLASHATTN_LIBRARY", os.environ.get("FLASHATTN_LIBRARY", ""))  # undone afterwards
    module = load("gpu")
    monkeypatch.setattr(module, "TOKENS", 256)
    monkeypatch.setattr(module, "HIDDEN", 64)
    monkeypatch.setattr(module.card, "DEVICE", "cpu")
    monkeypatch.setattr(module.card, "state", lambda: "A card, 1 MHz")
    monkeypatch.setattr(module.card, "present", lambda: True)

    def milliseconds(run, launches):
        begin = time.perf_counter()
        for _ in range(launches):
            run()
        return (time.perf_counter() - begin) * 1e3 / launches

    monkeypatch.setattr(module.card, "milliseconds", milliseconds)
    monkeypatch.setitem(module.card.PEERS, "efficient", module.card.SDPBackend.MATH)  # what the CPU has in its place
    monkeypatch.setitem(module.card.PEERS, "cudnn", module.card.SDPBackend.MATH)
    config = importlib.import_module("torch._functorch.config")
    with config.patch(donated_buffer=config.donated_buffer):  # undone afterwards
        yield module


def plain_flex(q, k, v, block_mask=None, score_mod=None, enable_gqa=False):
    """FlexAttention's place is taken by something that torch.compile can differentiate on the CPU."""
    import torch

    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5
    if score_mod is not None:
        b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
        scores = score_mod(scores, b, h, i, j)
    if block_mask is not None:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def test_v_of_the_gpu_bench_may_have_a_head_dim_of_its_own(gpu, monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    words = ["--head-dims", "24:16", "--seqlens", "64", "--groups", "1", "--json", file]
    assert run(gpu, monkeypatch, *words) == 0
    report, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert "24:16" in shown and "0 wrong answers" in shown
    assert all(isinstance(row["tflops"]["ours"], float) for row in report["rows"]) and len(report["rows"]) == 2 * 2
    assert all(line.startswith(("| forward | 24:16 ", "| backward | 24:16 ")) for line in list(plot.gpu_cells_table(report))[2:])
    assert {p["title"] for p in plot.gpu_figures(report)["gpu-both"]["panels"]} == {"no mask, head dim 24:16", "causal, head dim 24:16"}
    cell = gpu.Cell(24, 64, False, gpu.parse([]), 16)
    assert cell.flops(True) == pytest.approx(cell.flops(False) * (3 * 24 + 2 * 16) / (24 + 16))
    for wrong in (["--head-dims", "24:16:8"], ["--head-dims", "x"], ["--decode", "--head-dims", "24:16"]):
        with pytest.raises(SystemExit):
            run(gpu, monkeypatch, *wrong)
        assert "error: --" in capsys.readouterr().err


def test_the_gpu_bench_from_end_to_end(gpu, monkeypatch, tmp_path, capsys):
    import torch
    from torch.nn.attention import flex_attention

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: plain(f, backend="aot_eager", **options))
    monkeypatch.setattr(flex_attention, "flex_attention", plain_flex)
    file = tmp_path / "gpu.json"
    words = ["--head-dims", "16", "--seqlens", "64,128", "--groups", "1", "--math", "--flex", "--json", file]
    assert run(gpu, monkeypatch, *words) == 0
    report, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert len(report["rows"]) == 2 * 2 * 2 and "8 cells; 0 wrong answers" in shown
    for row in report["rows"]:
        assert set(row["tflops"]) == {"ours", "math", "efficient", "flex", "flash", "cudnn"}
        assert all(isinstance(speed, float) and speed > 0 for speed in row["tflops"].values()), (row, shown)
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["plot.py", str(file), "--out", str(tmp_path)])
    assert plot.main() == 0
    assert all(f">{name}<" in (tmp_path / "gpu-both.svg").read_text() for name in ("FlexAttention", "flashattn", "cuDNN"))


def test_block_masks_are_timed_and_checked(gpu, monkeypatch, tmp_path, capsys):
    masks, file = load("block_masks"), tmp_path / "masks.json"
    monkeypatch.setattr(masks.gpu, "TOKENS", 1024)
    monkeypatch.setattr(masks.gpu, "HIDDEN", 32)
    words = ["--head-dims", "16", "--seqlens", "512", "--groups", "1", "--json", file]
    assert run(masks, monkeypatch, *words) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * len(masks.PATTERNS) and "0 wrong answers" in capsys.readouterr().out
    assert all(isinstance(row["tflops"]["ours"], float) and 0 < row["seen"] < 1 for row in rows)
    right = masks.block_mask
    monkeypatch.setattr(masks, "block_mask", lambda pattern, s: ([(0, s, 0, s, masks.FULL)], *right(pattern, s)[1:]))  # slices that show more
    assert run(masks, monkeypatch, *words, "--patterns", "prefix") == 1
    assert "WRONG" in capsys.readouterr().out
    for wrong in (["--patterns", "stripes"], ["--seqlens", "256"], ["--head-dims", "x"]):
        with pytest.raises(SystemExit):
            run(masks, monkeypatch, *wrong)


def test_models_are_timed_and_checked(gpu, monkeypatch, tmp_path, capsys):
    models, file = load("models"), tmp_path / "models.json"
    assert all(int(heads.split(":")[0]) and queries > 0 and keys > 0 and not (causal and queries != keys) for heads, _, queries, keys, causal, _ in models.MODELS.values())
    monkeypatch.setattr(models, "MODELS", {"cross": ("3", "16", 48, 9, False, 0), "few": ("2", "8", 5, 70, False, 0), "causal": ("4:2", "16:8", 32, 32, True, 0), "local": ("2:1", "16", 40, 40, True, 7)})
    words = ["--tokens", "96", "--groups", "1", "--json", file]
    assert run(models, monkeypatch, *words) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["model"], row["pass"]) for row in rows] == [(name, what) for name in models.MODELS for what in ("forward", "backward")]
    assert "0 wrong answers" in capsys.readouterr().out and all(isinstance(row["tflops"]["ours"], float) for row in rows)
    assert [row["tokens"] for row in rows[::2]] == [96, 95, 96, 80] and isinstance(rows[0]["tflops"]["cudnn"], float)
    assert run(models, monkeypatch, *words, "--models", "ca,lo", "--passes", "forward") == 0
    assert [row["model"] for row in json.loads(file.read_text())["rows"]] == ["causal", "local"]
    right = models.gpu.ours
    monkeypatch.setattr(models.gpu, "ours", lambda cell: tuple(lambda n=n: [1.1 * t for t in right(cell)[n]()] for n in (0, 1)))
    assert run(models, monkeypatch, *words, "--models", "cross") == 1
    assert "WRONG" in capsys.readouterr().out
    for wrong in (["--models", "gpt5"], ["--tokens", "0"]):
        with pytest.raises(SystemExit):
            run(models, monkeypatch, *wrong)


def test_pieces_of_prompts_are_timed_and_checked(gpu, flash_attn_3, monkeypatch, tmp_path, capsys):
    prompts, file = load("prompts"), tmp_path / "prompts.json"
    monkeypatch.setattr(prompts.card, "graph_of", lambda run, error: f"WRONG {error}" if error is not None else argparse.Namespace(replay=run))
    words = ["--heads", "4:2", "--head-dims", "16", "--queries", "5,40", "--seqlens", "40", "--batches", "1,2", "--groups", "1", "--json", file]
    for more in ([], ["--pages", "8"], ["--fa3", "libfa3.so"]):
        assert run(prompts, monkeypatch, *words, *more) == 0
        rows = json.loads(file.read_text())["rows"]
        assert [(row["batch"], row["queries"]) for row in rows] == [(1, 5), (1, 40), (2, 5), (2, 40)] and "0 wrong answers" in capsys.readouterr().out
        assert all(isinstance(row["tflops"][name], float) for row in rows for name in (*prompts.PARTS, *(["fa3"] if "--fa3" in more else [])))
    for more in ([], ["--pages", "8"]):
        assert run(prompts, monkeypatch, *words, *more, "--among", "1,4") == 0
        rows = json.loads(file.read_text())["rows"]
        assert [(row["among"], row["queries"]) for row in rows] == [(1, 5), (1, 40), (4, 5), (4, 40)] and "0 wrong answers" in capsys.readouterr().out
        assert all(row["microseconds"][name] > 0 for row in rows for name in prompts.PARTS)
    mixed = prompts.Among("4:2", 16, 3, 5, 40)
    assert mixed.ends_q.tolist() == [0, 1, 6, 7, 8] and [len(q) for q, *_ in sorted(mixed.checked(mixed.q), key=lambda found: len(found[0]))] == [1, 1, 5]
    assert prompts.Piece("4:2", 16, 3, 5, 40).flops() == 4 * 16 * 4 * 3 * sum(range(36, 41))
    right = prompts.Piece.ours
    monkeypatch.setattr(prompts.Piece, "ours", lambda self, parts: (lambda found: (found[0], 1.1 * found[1]))(right(self, parts)))
    for more in ([], ["--among", "3"]):
        assert run(prompts, monkeypatch, *words, *more) == 1 and "WRONG" in capsys.readouterr().out
    for wrong in (["--queries", "41"], ["--pages", "7"], ["--batches", "0"]):
        with pytest.raises(SystemExit):
            run(prompts, monkeypatch, *words, *wrong)


@pytest.mark.parametrize("words", [["--softcap", "3"], ["--alibi"], ["--passes", "backward", "--softcap", "2", "--alibi"],
                                   ["--softcap", "2", "--alibi", "--pages", "16"], ["--pages", "64"], ["--bias", "heads"], ["--bias", "own", "--softcap", "2"],
                                   ["--bias", "keys", "--alibi"], ["--bias", "heads", "--dbias"], ["--bias", "own", "--dbias"]])
def test_the_gpu_bench_times_options(gpu, monkeypatch, tmp_path, capsys, words):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(gpu.torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(flex_attention, "flex_attention", plain_flex)
    file, paged, alone = tmp_path / "gpu.json", "--pages" in words, "--passes" in words or "--dbias" in words
    assert run(gpu, monkeypatch, "--head-dims", "16", "--seqlens", "64", "--groups", "1", "--flex", *words, "--json", file) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == (2 if paged or alone else 4) and "0 wrong answers" in capsys.readouterr().out
    assert {row["pass"] for row in rows} == ({"forward"} if paged else {"backward"} if alone else {"forward", "backward"})
    for row in rows:
        assert row["pages"] == (int(words[-1]) if paged else 0) and row["alibi"] == ("--alibi" in words)
        assert all(row["tflops"][name] > 0 for name in ("ours", "flex", *(["whole"] if paged else []))) and ("flash" in row["tflops"]) == (words == ["--pages", "64"])


@pytest.fixture
def flash_attn_3(monkeypatch):
    """FlashAttention-3's operators, computed by PyTorch for plain calls."""
    import torch

    def attention(q, k, v, causal, left, right):
        group, queries, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if causal else right if right >= 0 else keys).triu(-left if left >= 0 else -queries)
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen).transpose(1, 2)

    def fwd(q, k, v, is_causal=False, window_size_left=-1, window_size_right=-1):
        return attention(q, k, v, is_causal, window_size_left, window_size_right), None, None, None

    def bwd(dout, q, k, v, out, lse, dq, dk, dv, is_causal=False, window_size_left=-1, window_size_right=-1, deterministic=False):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        for to, found in zip((dq, dk, dv), torch.autograd.grad(attention(*leaves, is_causal, window_size_left, window_size_right), leaves, dout)):
            to.copy_(found)

    loaded = []
    monkeypatch.setattr(torch.ops, "flash_attn_3", argparse.Namespace(fwd=fwd, bwd=bwd), raising=False)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    return loaded


def test_the_gpu_bench_takes_flash_attention_3_from_a_library(gpu, flash_attn_3, monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert run(gpu, monkeypatch, "--head-dims", "16", "--seqlens", "64", "--groups", "1", "--fa3", "some.so", "--json", file) == 0
    rows = json.loads(file.read_text())["rows"]
    assert flash_attn_3 == ["some.so"] and len(rows) == 4 and all(row["tflops"]["fa3"] > 0 for row in rows)
    monkeypatch.setattr(gpu.fa3.torch.ops.flash_attn_3, "fwd", lambda q, *others, **named: [q, None])
    assert run(gpu, monkeypatch, "--head-dims", "16", "--seqlens", "64", "--groups", "1", "--passes", "forward", "--fa3", "some.so", "--json", file) == 1
    assert all(row["tflops"]["fa3"].startswith("WRONG") for row in json.loads(file.read_text())["rows"])


def test_the_gpu_bench_times_windows(gpu, flash_attn_3, monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert run(gpu, monkeypatch, "--head-dims", "16", "--seqlens", "64", "--groups", "1", "--window", "24", "--fa3", "some.so", "--json", file) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and "0 wrong answers" in capsys.readouterr().out
    for row in rows:
        assert row["window"] == 24 and set(row["tflops"]) == {"ours", "flash", "fa3"} and row["tflops"]["ours"] > 0 and row["tflops"]["fa3"] > 0
        assert row["tflops"]["flash"] is None or row["tflops"]["flash"] > 0  # PyTorch's operator is for CUDA alone
    for left, right in ((23, 0), (12, 12), (100, 0)):
        assert gpu.seen_pairs(64, left, right) == sum(-left <= j - i <= right for i in range(64) for j in range(64))
    for words in (["--window", "-1"], ["--window", "24", "--softcap", "2"], ["--window", "24", "--math"], ["--window", "24", "--decode"]):
        with pytest.raises(SystemExit):
            run(gpu, monkeypatch, *words)
        assert "--window is at least 0" in capsys.readouterr().err.splitlines()[-1]


def test_few_queries_beside_flash_attention_3(gpu, flash_attn_3, monkeypatch):
    import torch

    cell = gpu.gpu_decode.Decode(torch.randn(1 << 19).to(torch.bfloat16), 64, 2, 1, 128)
    assert cell.run_of("fa3")[1] is None
    monkeypatch.setattr(torch.ops.flash_attn_3, "fwd", lambda q, *others: [q, None])
    assert cell.run_of("fa3")[1] > 1e-2


def test_few_queries_whose_first_keys_are_padding(gpu):
    import torch

    cell = gpu.gpu_decode.Decode(torch.randn(1 << 19).to(torch.bfloat16), 64, 2, 2, 64, padded=True)
    cell.bias[1, ..., :16] = float("-inf")
    assert cell.run_of("ours")[1] is None and cell.run_of("cudnn")[1] is None
    assert cell.wrong(torch.zeros_like(cell.q)) == pytest.approx(1)


def test_latent_attention_and_its_peer_are_right_and_wrong_answers_are_seen(gpu, monkeypatch):
    import torch

    mla = load("mla")
    monkeypatch.setattr(mla.Cell, "L2_BYTES", 1)
    for queries in (1, 3):
        cell = mla.Cell(2, 8, queries, 40)
        runs = [cell.ours(), cell.ours(parts=1), cell.ours(page=8), cell.efficient()]
        assert [error for _, error in runs] == [None] * 4
        assert cell.wrong(torch.zeros(2, queries, 8, mla.DV, dtype=torch.bfloat16)) == pytest.approx(1)
        assert cell.flops == 2 * 1088 * 2 * 8 * sum(40 - queries + 1 + i for i in range(queries))


@pytest.mark.parametrize("words", [["--alibi", "--varlen"], ["--pages", "24", "--seqlens", "64"], ["--softcap", "-1"]])
def test_the_gpu_bench_refuses_options_that_it_cannot_time(gpu, monkeypatch, capsys, words):
    with pytest.raises(SystemExit):
        run(gpu, monkeypatch, *words)
    assert "--softcap" in capsys.readouterr().err.splitlines()[-1]


def test_a_wrong_or_missing_peer_is_said_and_not_timed(gpu, monkeypatch, tmp_path, capsys):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(gpu.torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(flex_attention, "flex_attention", lambda q, k, v, **terms: plain_flex(q, k, v) * 1.1)
    monkeypatch.setitem(gpu.card.PEERS, "cudnn", gpu.card.SDPBackend.CUDNN_ATTENTION)  # which the CPU lacks
    file = tmp_path / "gpu.json"
    assert run(gpu, monkeypatch, "--head-dims", "32", "--seqlens", "64", "--groups", "1", "--flex", "--json", file) == 1
    for row in json.loads(file.read_text())["rows"]:
        assert row["tflops"]["flex"].startswith("WRONG") and row["tflops"]["cudnn"] is None and row["tflops"]["ours"] > 0
    shown = capsys.readouterr().out
    assert "WRONG" in shown and "4 wrong answers" in shown


GROUPED = ["--head-dims", "16", "--seqlens", "64", "--groups", "1", "--heads", "4:2", "--tokens", "192"]


@pytest.mark.parametrize("words", [["--math", "--fa3", "some.so"], ["--alibi"], ["--pages", "16"], ["--fp8", "--passes", "forward"]])
def test_the_gpu_bench_times_grouped_heads(gpu, flash_attn_3, monkeypatch, tmp_path, capsys, words):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(gpu.torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(flex_attention, "flex_attention", plain_flex)
    file = tmp_path / "gpu.json"
    assert run(gpu, monkeypatch, *GROUPED, "--flex", *words, "--json", file) == 0
    rows, shown = json.loads(file.read_text())["rows"], capsys.readouterr().out
    more = {"--math": {"math", "fa3"}, "--pages": {"whole"}, "--fp8": {"fp8"}}.get(words[0], set())
    for row in rows:
        assert (row["heads"], row["heads_k"], row["tokens"]) == (4, 2, 192)
        assert set(row["tflops"]) == {"ours", "flex"} | ({"flash", "cudnn"} | more if words != ["--alibi"] else set())  # no `efficient`
        assert all(isinstance(speed, float) and speed > 0 for speed in row["tflops"].values()), (row, shown)
    assert len(rows) == (4 if words[0] in ("--math", "--alibi") else 2) and "0 wrong answers" in shown


@pytest.mark.parametrize("errors", [False, True])
def test_the_gpu_bench_has_float32(gpu, monkeypatch, tmp_path, capsys, errors):
    file = tmp_path / "gpu.json"
    words = ["--float32", "--math", "--head-dims", "32", "--seqlens", "64", "--groups", "1", "--tokens", "128", *(["--errors"] if errors else [])]
    assert run(gpu, monkeypatch, *words, "--json", file) == 0
    rows, shown = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert len(rows) == 4 and "0 wrong answers" in shown and ("best peer" in shown) != errors
    for row in rows:
        found = row["errors" if errors else "tflops"]
        assert row["float32"] and set(found) == {"ours", "math", "efficient"}
        assert all(0 < x < (1e-5 if errors else math.inf) for x in found.values()), row


def test_the_gpu_bench_packs_grouped_heads(gpu, monkeypatch, tmp_path):
    """varlen_attn's place is taken by PyTorch's attention of each sequence."""
    import torch
    from torch.nn.attention import varlen

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
        assert max_q == max_k == 64 and torch.equal(cu_q, cu_k) and enable_gqa == (q.shape[1] != k.shape[1])
        parts = zip(*(t.transpose(0, 1).split(cu_q.diff().tolist(), 1) for t in (q, k, v)))
        outs = [torch.nn.functional.scaled_dot_product_attention(*part, is_causal=window_size == (-1, 0), enable_gqa=enable_gqa) for part in parts]
        return torch.cat(outs, 1).transpose(0, 1)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setitem(gpu.card.PEERS, "flash", gpu.card.SDPBackend.MATH)
    file = tmp_path / "gpu.json"
    assert run(gpu, monkeypatch, *GROUPED, "--varlen", "--json", file) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and all((row["heads"], row["heads_k"], row["tokens"]) == (4, 2, 192) for row in rows)
    assert all(row["tflops"]["ours"] > 0 and row["tflops"]["flash"] > 0 and row["tflops"]["cudnn"] is None for row in rows)


def test_heads_and_tokens_make_the_problem(gpu):
    cell = gpu.Cell(16, 64, False, gpu.parse(["--heads", "6:3", "--tokens", "192"]))
    assert cell.q.shape == (3, 64, 6, 16) and cell.k.shape == cell.v.shape == (3, 64, 3, 16) and cell.dout.shape == cell.q.shape
    assert cell.flops(False) == 4 * 64**2 * 16 * 6 * 3
    for words, heads, batch in (([], (4, 4), 4), (["--heads", "3"], (3, 3), 4), (["--tokens", "130"], (4, 4), 2), (["--tokens", "8"], (4, 4), 1)):
        cell = gpu.Cell(16, 64, False, gpu.parse(words))
        assert (cell.heads, cell.heads_k) == heads and cell.q.shape[0] == batch and cell.tokens == batch * 64
    for tokens, packed in (("200", 200), ("8", 64)):
        cell = gpu.Cell(16, 64, False, gpu.parse(["--varlen", "--tokens", tokens]))
        assert sum(cell.lengths) == cell.tokens == cell.q.shape[0] == packed and max(cell.lengths) == 64
    assert gpu.parse(["--heads", "4", "--dropout", "0.1", "--tokens", "1"]).heads == (4, 4)
    assert "efficient" in gpu.names_of(gpu.parse(["--heads", "4"])) and "efficient" not in gpu.names_of(gpu.parse(["--heads", "4:1"]))


@pytest.mark.parametrize("words", [[], ["--varlen"]])
def test_a_query_head_that_dk_and_dv_lack_is_found(gpu, words):
    cell = gpu.Cell(16, 64, True, gpu.parse(["--heads", "6:2", *words]))
    assert cell.wrong(gpu.ours(cell)[1](), 1) is None
    cell.dout[..., 2, :] = 0  # what the last of key head 0 adds is gone
    dq, dk, dv = gpu.ours(cell)[1]()
    assert cell.wrong([dq], 1) is None and cell.wrong([dk], 2) > 0.1 and cell.wrong([dv], 3) > 0.1


@pytest.mark.parametrize("words, says", [
    *[(["--heads", heads], f"--heads {heads}: expected") for heads in ("x", "", "0", "4:0", "4:3", "2:4", "4:2:1", "4:")], (["--tokens", "0"], "--tokens 0"),
    (["--decode", "--heads", "8"], "--decode has 32 heads"), (["--decode", "--tokens", "64"], "--decode has 32 heads"),
    (["--heads", "4:2", "--dropout", "0.1"], "--dropout is checked on one query head")])
def test_heads_and_tokens_that_the_gpu_bench_cannot_take_are_refused(gpu, capsys, words, says):
    with pytest.raises(SystemExit):
        gpu.parse(words)
    assert f" error: {says}" in capsys.readouterr().err.splitlines()[-1]


def test_few_queries_are_timed_and_wrong_ones_are_not(gpu, flash_attn_3, monkeypatch, tmp_path, capsys):
    """Instead of a graph the calls themselves are timed."""
    module = gpu.gpu_decode
    monkeypatch.setattr(gpu.card, "graph_of", lambda run, error: argparse.Namespace(replay=run) if error is None else f"WRONG {error:.1e}")
    for name, small in (("L2_BYTES", 1), ("LEAST_POOL", 1 << 20)):
        monkeypatch.setattr(module.Decode, name, small)
    file = tmp_path / "gpu.json"
    words = ["--decode", "--head-dims", "16", "--seqlens", "512", "--queries", "1,3", "--batches", "2", "--groups", "1", "--fa3", "some.so", "--json", file]
    assert run(gpu, monkeypatch, *words) == 0
    rows, shown = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert [(row["pass"], row["queries"], row["seqlen"]) for row in rows] == [("decode", 1, 512), ("decode", 3, 512)] and "0 wrong answers" in shown
    names = {"read", "copy", "ours", "by batch", "paged16", "paged64", "paged256", "flash", "cudnn", "fa3"}
    assert all(set(row["gigabytes_per_second"]) == names and min(row["gigabytes_per_second"].values()) > 0 for row in rows), shown
    monkeypatch.setattr(module.fa3, "few_queries", lambda q, k, v: q)
    assert run(gpu, monkeypatch, *words, "--queries", "1") == 1
    assert json.loads(file.read_text())["rows"][0]["gigabytes_per_second"]["fa3"].startswith("WRONG")


@pytest.mark.slow
def test_flex_attention_itself_agrees(gpu):
    """Compiled for the CPU, where it has a forward only."""
    for causal in (False, True):
        cell = gpu.Cell(32, 128, causal, gpu.parse([]))
        forward, backward = gpu.flex(cell)
        assert cell.wrong(forward(), 0) is None
        with pytest.raises(Exception, match="CPU"):
            backward()
