#!/usr/bin/env python3
"""Tests of `flashattn bench`, with Python's standard library alone.

python3 tests/test_cli_bench.py path/to/flashattn [unittest options]
"""

import json
import os
import subprocess
import sys
import time
import unittest

from cli_support import BENCH, COMMAND, Case, run


class Bench(Case):
    def rows(self, *words):
        run("bench", *words, "--json", self.path("b.json"))
        with open(self.path("b.json")) as file:
            return json.load(file)["rows"]

    def test_bench(self):
        table = run(*BENCH, "--json", self.path("b.json"), "--csv", self.path("b.csv"))
        with open(self.path("b.json")) as file:
            report = json.load(file)
        self.assertEqual(
            list(report),
            (
                "schema version device device_name isa features quick standard_products standard_dtype memory_meaning "
                "rows peaks num_rows num_wrong peak_rss_bytes"
            ).split(),
        )
        keys = (
            "pass dtype batch heads heads_k seqlen_q seqlen_k head_dim causal options threads kernel right error "
            "tolerance flops repeats min_ms median_ms gflops fma_peak_gflops fma_peak_name amx_peak_gflops "
            "bf16_peak_gflops memory_bytes standard standard_over_memory_limit standard_memory_bytes ratio_to_standard "
            "efficiency efficiency_of_peak"
        ).split()
        self.assertEqual(report["num_rows"], 2 * 2 * 2 * 2)  # passes, dtypes, masks, lengths
        self.assertEqual(len(report["rows"]), report["num_rows"])
        for row in report["rows"]:
            self.assertEqual(list(row), keys)
            self.assertEqual(list(row["standard"]), ["min_ms", "median_ms", "gflops", "error"])
            self.assertTrue(row["right"])
            self.assertGreaterEqual(row["median_ms"], row["min_ms"])
            self.assertLessEqual(row["fma_peak_gflops"], report["peaks"][0]["fma_gflops"])
            self.assertEqual(
                row["standard_memory_bytes"],
                2 * row["seqlen_k"] * (4 * row["seqlen_k"] if row["pass"] == "forward" else 8 * row["seqlen_k"] + 4),
            )
            pairs = row["seqlen_k"] ** 2 * (0.5 if row["causal"] else 1)
            self.assertEqual(row["flops"], 4 * pairs * 16 * 2 * (1 if row["pass"] == "forward" else 2.5))
        with open(self.path("b.csv")) as file:
            lines = file.read().splitlines()
        self.assertEqual(len(lines), 1 + report["num_rows"])
        self.assertEqual({line.count(",") for line in lines}, {29})
        self.assertEqual(table.count("forward "), 8)

    def test_a_bench_that_is_stopped_leaves_the_file_of_the_one_before(self):
        with open(self.path("b.json"), "w") as file:
            file.write("before")
        bench = subprocess.Popen([COMMAND[0], "bench", "--seconds", "60", "--json", self.path("b.json")], stdout=subprocess.DEVNULL)
        while bench.poll() is None and not any(name.startswith("b.json.part") for name in self.files()):
            time.sleep(0.01)
        bench.kill()
        self.assertEqual(bench.wait(), -9)
        with open(self.path("b.json")) as file:
            self.assertEqual(file.read(), "before")

    def test_bench_skips_standard_attention_beyond_the_memory_limit(self):
        table = run(
            *BENCH,
            "--memory-limit",
            "10K",
            "--pass",
            "forward",
            "--dtype",
            "f32",
            "--mask",
            "full",
            "--json",
            self.path("b.json"),
        )
        with open(self.path("b.json")) as file:
            rows = json.load(file)["rows"]
        self.assertEqual([row["standard_over_memory_limit"] for row in rows], [False, True])  # 8 KB and 18 KB
        self.assertIsNone(rows[1]["standard"])
        self.assertIn("over the limit", table)

    OPTIONS = "--seqlen 75,200 --head-dim 40 --batch 2 --heads 4 --heads-k 2 --threads 1 --seconds 0".split()

    def test_every_option_of_the_problem_is_computed_as_the_formula_says(self):
        """A row is right if it agrees with the formula that the bench writes apart from the library. An option that
        reached neither would leave the errors what they are without it."""
        plain = self.rows(*self.OPTIONS)
        for words, text in [
            ("--softcap 3", "softcap 3"),
            ("--scale -0.2", "scale -0.2"),
            ("--bias", "bias"),
            ("--alibi", "alibi"),
            ("--sinks", "sinks"),
            ("--dropout 0.25,3,99999999999", "dropout 0.25 seed 3 offset 99999999999"),
            ("--blocks 3", "blocks 3"),
            ("--blocks 2 --softcap 2 --sinks --alibi --bias --dropout 0.1", None),
        ]:
            rows = self.rows(*self.OPTIONS, *words.split())
            self.assertEqual(len(rows), len(plain))
            for row, without in zip(rows, plain):
                self.assertTrue(row["right"], (words, row))
                self.assertNotEqual(row["error"], without["error"], (words, row))
                self.assertIsNone(row["standard"])
                self.assertEqual(row["options"], text or row["options"])
        self.assertEqual({row["options"] for row in plain}, {""})

    def test_a_window_and_blocks_count_the_pairs_that_are_seen(self):
        def seen(s, left, right, blocks):
            bounds = [s * n // blocks for n in range(blocks + 1)]
            block = [n for n in range(blocks) for _ in range(bounds[n], bounds[n + 1])]
            return sum(
                block[i] == block[j] and (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
                for i in range(s)
                for j in range(s)
            )

        for words, left, right, blocks in [
            ("--window 20,0", 20, 0, 1),
            ("--window 5,-1", 5, -1, 1),
            ("--window 9,9 --blocks 3", 9, 9, 3),
            ("--blocks 4 --mask causal", -1, 0, 4),
        ]:
            rows = self.rows(*self.OPTIONS, *words.split())
            self.assertEqual(len(rows), 8)  # passes, dtypes, lengths
            for row in rows:
                pairs = seen(row["seqlen_k"], left, right, blocks)
                self.assertTrue(row["right"], (words, row))
                self.assertEqual(row["flops"], 4 * pairs * 40 * 4 * 2 * (1 if row["pass"] == "forward" else 2.5))

    def test_few_queries_on_many_keys_in_parts(self):
        words = "--seqlen 700 --seqlen-q 2 --head-dim 64 --heads 8 --heads-k 2 --pass forward --seconds 0".split()
        for options in ("--num-splits 3", "--num-splits -1", "--window 300,0 --sinks", "--blocks 2 --alibi"):
            for row in self.rows(*words, *options.split()):
                self.assertTrue(row["right"], (options, row))

    def test_what_the_library_refuses_is_said_as_it_says_it(self):
        for words, says in [
            ("--softcap -1", "softcap is -1"),
            ("--dropout 1.5", "dropout.p is 1.5"),
            ("--num-splits 999", "num_splits is 999"),
            ("--num-splits -2", "expected a whole number from -1"),
            ("--threads 1,9999", "num_threads is 9999"),
        ]:
            self.refused("bench", "--seqlen", "32", *words.split(), says=says)
            self.refused("bench", "--seqlen", "32", *words.split(), "--json", self.path("not.json"), says=says)
        files = "--json", self.path("both"), "--csv"
        self.refused("bench", "--seqlen", "32", *files, self.path("./both"), says="--json and --csv are the same file")
        self.refused("bench", "--seqlen", "32", *files, self.path("none/both"), says="--csv ")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    COMMAND[0] = os.path.abspath(sys.argv.pop(1))
    unittest.main()
