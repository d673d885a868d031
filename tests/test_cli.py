#!/usr/bin/env python3
"""Tests of the `flashattn` command, with Python's standard library alone.

python3 tests/test_cli.py path/to/flashattn [unittest options]
"""

import json
import math
import os
import pty
import subprocess
import sys
import unittest

from cli_support import (
    BENCH,
    COMMAND,
    TIMEOUT_S,
    Case,
    attention,
    bf16_bits,
    npy,
    read_npy,
    read_values,
    run,
    write_npy,
)

COMMANDS = ["info", "run", "check", "bench", "explain", "compile", "tune"]


class Help(unittest.TestCase):
    def test_output_that_goes_nowhere_is_an_error(self):
        for words in (["--help"], ["--version"], ["help", "run"], ["explain"], ["info", "--json"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([COMMAND[0], *words], stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
            self.assertEqual((done.returncode, done.stderr), (2, b"flashattn: standard output could not be written\n"), words)

    def test_every_command_has_help_with_examples(self):
        listing = run("--help")
        for command in COMMANDS:
            self.assertIn(command, listing)
            text = run(command, "--help")
            self.assertEqual(text, run("help", command))
            self.assertTrue(text.startswith(f"usage: flashattn {command}"), text)
            self.assertIn("\nexamples:\n  flashattn " + command, text)
            self.assertLessEqual(max(map(len, text.splitlines())), 120)

    def test_every_option_in_the_examples_is_an_option(self):
        for command in COMMANDS:
            options, examples = run(command, "--help").split("examples:\n")
            known = {line.split()[0] for line in options.splitlines() if line.startswith("  --")}
            for line in examples.splitlines():
                words = line.split()
                self.assertEqual(words[:2], ["flashattn", command])
                self.assertLessEqual({word for word in words if word.startswith("--")}, known, line)

    def test_version_is_three_numbers(self):
        self.assertRegex(run("--version"), r"^flashattn \d+\.\d+\.\d+\n$")

    def test_nothing_to_do_is_wrong_usage(self):
        self.assertIn("usage: flashattn COMMAND", run(expect=2))


class Typos(Case):
    def test_a_command_gets_the_nearest_word(self):
        for typo, word in [("bnech", "bench"), ("rnu", "run"), ("chekc", "check"), ("--vresion", "--version")]:
            self.refused(typo, says=f"did you mean '{word}'?")

    def test_a_word_near_nothing_gets_no_guess(self):
        self.assertNotIn("did you mean", run("zzzzzzzz", expect=2))
        self.assertNotIn("did you mean", run("run", "--zzzzzzzzzzzz", "1", expect=2))

    def test_an_option_gets_the_nearest_word(self):
        for command, typo, word in [
            ("run", "--causla", "--causal"),
            ("run", "--cu-seqlens-p", "--cu-seqlens-q"),
            ("bench", "--head-dims=64", "--head-dim"),
            ("check", "--gruop", "--group"),
            ("info", "--jsno", "--json"),
            ("explain", "--soft-cap", "--softcap"),
        ]:
            self.refused(command, typo, says=f"did you mean '{word}'?")

    def test_a_group_gets_the_nearest_word(self):
        self.refused("check", "--group", "cuasal", says="did you mean 'causal'?")

    def test_kernels_by_name_refuse_what_is_not_theirs(self):
        self.refused("bench", "--kernel", "k4.3", says="did you mean k")
        self.refused("bench", "--kernel", "k2,nothing", says="expected all, or some of k1")
        self.refused("bench", "--kernel", "k2", "--device", "cpu", says="--kernel runs on the GPU")
        for words in (["--quick"], ["--threads", "1"], ["--pass", "both"], ["--csv", "x"], ["--no-standard"], ["--alibi"]):
            self.refused("bench", "--kernel", "all", *words, says="does not go with --kernel")

    def test_without_a_gpu_the_ladder_says_so_in_one_sentence(self):
        if json.loads(run("info", "--json"))["cuda_error"] is None:
            self.skipTest("there is a GPU")
        sentence = run("bench", "--kernel", "all", expect=2)
        self.assertRegex(sentence, r"^flashattn: .*GPU.*\n$")

    def test_values_that_mean_nothing_are_refused(self):
        for words in [
            ("explain", "--seqlen", "12x"),
            ("explain", "--seqlen", "-1"),
            ("explain", "--seqlen", ""),
            ("explain", "--heads", "99999999999"),
            ("explain", "--scale", "nan"),
            ("explain", "--scale", "1e-99"),
            ("explain", "--window", "3"),
            ("explain", "--window", "3,-2"),
            ("explain", "--window", "3,4,5"),
            ("explain", "--dropout", "x"),
            ("explain", "--dropout", "0.1,-1"),
            ("explain", "--dtype", "f64"),
            ("explain", "--dropout", "0.1,2,3,4"),
            ("explain", "--device", "gpu"),
            ("explain", "--device", "cuda:x"),
            ("explain", "--isa", "sse"),
            ("bench", "--seqlen", "1,,2"),
            ("bench", "--seqlen", "0"),
            ("bench", "--seqlen-q", "0"),
            ("bench", "--heads", "0"),
            ("bench", "--heads-k", "0"),
            ("bench", "--batch", "0"),
            ("bench", "--dtype", "f32,f8e4m3"),
            ("bench", "--memory-limit", "1X"),
            ("bench", "--mask", "half"),
            ("bench", "--pass", "sideways"),
            ("bench", "--seqlen", "1,"),
            ("bench", "--softcap", "inf"),
            ("bench", "--scale", "x"),
            ("bench", "--window", "3"),
            ("bench", "--blocks", "-1"),
            ("bench", "--dropout", "0.1,x"),
            ("bench", "--num-splits", "1.5"),
        ]:
            self.refused(*words, says=[words[1], "expected"])

    def test_options_that_do_not_go_together_are_refused(self):
        self.refused("explain", "--seqlen", says="needs a value")
        self.refused("explain", "--causal=1", says="takes no value")
        self.refused("explain", "--heads", "2", "--heads", "4", says="given twice")
        self.refused("explain", "causal", says="not an option")
        self.refused("explain", "--causal", "--window", "1,1", says="exclude")
        self.refused("bench", "--heads", "4", "--heads-k", "3", says="not a multiple")
        self.refused("bench", "--mask", "full", "--window", "1,1", says="exclude")
        self.refused("bench", "--seqlen", "64", "--seqlen-q", "4", "--blocks", "5", says="--blocks 5: more than")
        self.refused("bench", "--bias=1", says="takes no value")
        _, qkv = self.qkv()
        self.refused("run", says="are needed")
        self.refused("run", *qkv, says="nothing to write")
        self.refused("run", *qkv, "--dq", self.path("dq.npy"), says="--dout")
        self.refused("info", "--read-bytes", "2M", says="needs --measure")
        for place in ("missing/o.npy", "."):  # before q is read, which is not there either
            self.refused("run", "--q", "none", *qkv[2:], "--o", self.path(place), says=f"--o {self.path(place)}: ")
        here, there = self.path("o.npy"), self.path("./o.npy")
        for first, second in ((here, here), (here, there)):  # a file that is not there yet, and one that is
            self.refused("run", *qkv, "--o", first, "--lse", second, says="--o and --lse are the same file")
        self.refused("run", *qkv, "--o", "-", says="--o is -, expected a file")
        os.link(self.path("k.npy"), self.path("linked.npy"))
        for name in ("k.npy", "./k.npy", "linked.npy"):
            self.refused("run", *qkv, "--o", self.path(name), says="--k and --o are the same file")

    def test_a_library_refusal_is_printed_as_the_library_says_it(self):
        self.refused("explain", "--heads", "6", "--heads-k", "4", says=["explain: invalid argument", "heads"])
        for option, field in (("--heads", "heads_q"), ("--heads-k", "heads_k"), ("--head-dim", "head_dim"), ("--head-dim-v", "head_dim_v")):
            self.refused("explain", option, "0", says=f"({field}) is 0, expected 1 to")


class Npy(Case):
    def forward(self, words, expected, kind="<f4", tolerance=2e-6):
        run("run", "--device", "reference", *words, "--o", self.path("o.npy"), "--lse", self.path("lse.npy"))
        descr, shape, values = read_npy(self.path("o.npy"))
        self.assertEqual((descr, shape), (kind, (self.B, self.SQ, self.H, self.D)))
        self.near(values, expected[0], tolerance)
        descr, shape, values = read_npy(self.path("lse.npy"))
        self.assertEqual((descr, shape), ("<f4", (self.B, self.H, self.SQ)))
        self.near(values, expected[1])

    def test_float32_of_every_version_and_order(self):
        for version in (1, 2, 3):
            for in_fortran_order in (False, True):
                values, words = self.qkv(version=version, in_fortran_order=in_fortran_order)
                self.forward(words, attention(*values, self.shape()))

    def test_float16(self):
        values, words = self.qkv(kind="f2")
        self.forward(words, attention(*values, self.shape()), "<f2", 1e-3)

    def test_bfloat16_as_ml_dtypes_stores_it(self):
        values, words = self.qkv(kind="V2")
        self.forward(words, attention(*values, self.shape()), "<V2", 8e-3)

    def test_plain_words_need_to_be_called_bfloat16(self):
        values, words = self.qkv()
        for name, value in zip("qkv", values):
            shape = (self.B, self.SQ if name == "q" else self.SK, self.H, self.D)
            write_npy(self.path(name + ".npy"), [bf16_bits(x) for x in value], shape, kind="u2")
        self.refused("run", *words, "--o", self.path("o.npy"), says="--dtype bf16")
        self.forward(words + ["--dtype", "bf16"], attention(*values, self.shape()), "<V2", 8e-3)

    def test_other_types_are_refused_with_what_to_do(self):
        for how, says in [
            ({"kind": "f8"}, "astype('<f4')"),
            ({"order": ">"}, "astype('<f4')"),
            ({"kind": "i4"}, "expected"),
        ]:
            values, words = self.qkv()
            write_npy(self.path("k.npy"), [int(x) for x in values[1]], (self.B, self.SK, self.H, self.D), **how)
            self.refused("run", *words, "--o", self.path("o.npy"), says=["k.npy", says])

    def test_other_shapes_are_refused_with_what_was_expected(self):
        values, words = self.qkv()
        write_npy(self.path("q.npy"), values[0], (self.B * self.SQ, self.H, self.D))
        self.refused("run", *words, "--o", self.path("o.npy"), says=["[10, 2, 4]", "[batch, seqlen, heads, head_dim]"])

    def test_hostile_headers_are_refused(self):
        _, words = self.qkv()
        good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 7, 2, 4), }\n"
        data = bytes(2 * 7 * 2 * 4 * 4)
        hostile = {
            "empty file": b"",
            "other magic": b"\x93NUMPX" + npy(good, data)[6:],
            "version 9": npy(good, data)[:6] + b"\x09\x00" + npy(good, data)[8:],
            "version 1.1": npy(good, data)[:6] + b"\x01\x01" + npy(good, data)[8:],
            "header beyond the file": npy(good, data)[:8] + b"\xff\xff" + good.encode(),
            "header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + good.encode(),
            "zero byte in the header": npy(good.replace("}", "\0}"), data),
            "too few elements": npy(good, data[:-1]),
            "too many elements": npy(good, data + b"\0"),
            "no descr": npy("{'fortran_order': False, 'shape': (2, 7, 2, 4), }\n", data),
            "no shape": npy("{'descr': '<f4', 'fortran_order': False}\n", data),
            "no order": npy("{'descr': '<f4', 'shape': (2, 7, 2, 4)}\n", data),
            "key twice": npy(good.replace("}", "'shape': (2, 7, 2, 4)}"), data),
            "unknown key": npy(good.replace("}", "'x': 1}"), data),
            "no dictionary": npy("[1, 2]\n", data),
            "open dictionary": npy(good.replace("}", ""), data),
            "text behind": npy(good.replace("}", "} 1"), data),
            "open string": npy("{'descr': '<f4, \n", data),
            "structured": npy(good.replace("'<f4'", "[('a', '<f4')]"), data),
            "objects": npy(good.replace("<f4", "|O"), data),
            "long type": npy(good.replace("<f4", "<f4" * 100), data),
            "negative": npy(good.replace("7", "-7"), data),
            "no number": npy(good.replace("7", "x"), data),
            "float": npy(good.replace("7", "7.0"), data),
            "nine dimensions": npy(good.replace("(2, 7, 2, 4)", "(1, 1, 1, 1, 1, 2, 7, 2, 4)"), data),
            "2^64": npy(good.replace("7", str(2**64 + 7)), data),
            "product overflows": npy(good.replace("7", str(2**62)), data),
            "product wraps to the right size": npy(good.replace("(2, 7, 2, 4)", f"({2**61}, 8, {2**61}, 4)"), data),
            "zero hides an overflow": npy(good.replace("(2, 7, 2, 4)", f"({2**62}, 0, {2**62}, 4)"), b""),
        }
        for name, content in hostile.items():
            with self.subTest(name):
                with open(self.path("k.npy"), "wb") as file:
                    file.write(content)
                self.refused("run", "--device", "reference", *words, "--o", self.path("o.npy"), says="k.npy")

    def test_every_truncation_is_refused(self):
        _, words = self.qkv()
        with open(self.path("k.npy"), "rb") as file:
            content = file.read()
        for length in [*range(0, 90, 7), len(content) - 1]:
            with open(self.path("k.npy"), "wb") as file:
                file.write(content[:length])
            self.refused("run", "--device", "reference", *words, "--o", self.path("o.npy"), says="k.npy")

    def test_damaged_headers_never_crash(self):
        _, words = self.qkv()
        with open(self.path("k.npy"), "rb") as file:
            content = file.read()
        header_end = content.index(b"\n") + 1
        for _ in range(150):
            damaged = bytearray(content)
            for _ in range(self.random.randint(1, 4)):
                damaged[self.random.randrange(6, header_end)] = self.random.choice(b"(){}',: 0129-<>fViuTF\0\xff")
            with open(self.path("k.npy"), "wb") as file:
                file.write(damaged)
            done = subprocess.run(
                [COMMAND[0], "run", "--device", "reference", *words, "--o", self.path("o.npy")],
                capture_output=True,
                timeout=TIMEOUT_S,
            )
            self.assertIn(done.returncode, (0, 2), bytes(damaged[:header_end]))
            self.assertEqual(done.returncode == 0, os.path.exists(self.path("o.npy")))
            if done.returncode == 0:
                os.unlink(self.path("o.npy"))

    def test_files_that_are_not_there_are_refused(self):
        _, words = self.qkv()
        os.unlink(self.path("v.npy"))
        self.refused("run", *words, "--o", self.path("o.npy"), says=["v.npy", "No such file"])
        os.mkdir(self.path("v.npy"))
        self.refused("run", *words, "--o", self.path("o.npy"), says="v.npy")

    def test_nothing_is_written_unless_everything_can_be(self):
        _, words = self.qkv()
        self.refused(
            "run",
            "--device",
            "reference",
            *words,
            "--o",
            self.path("o.npy"),
            "--lse",
            self.path("no/lse.npy"),
            says=["--lse", "No such file"],
        )
        long = os.path.join(self.path(""), "./" * 2040 + "lse.npy")
        self.refused("run", *words, "--o", self.path("o.npy"), "--lse", long, says=["--lse", "too long"])


class Run(Case):
    """Options against attention in Python, on the reference; and the CPU against the reference."""

    def outputs(self, *words, names=("o", "lse")):
        files = [word for name in names for word in ("--" + name, self.path(name + ".npy"))]
        run("run", *words, *files)
        return [read_npy(self.path(name + ".npy"))[2] for name in names]

    def both(self, words, expected=None, names=("o", "lse")):
        """On both devices; the reference against `expected`, the CPU against the reference."""
        reference = self.outputs("--device", "reference", *words, names=names)
        for found, wanted in zip(reference, expected or []):
            self.near(found, wanted)
        for tier in ("scalar", "auto"):
            for found, wanted in zip(self.outputs("--device", "cpu", "--isa", tier, *words, names=names), reference):
                self.near(found, wanted, 1e-5)
        return reference

    def test_an_output_goes_where_a_link_leads(self):
        _, words = self.qkv()
        os.symlink("there.npy", self.path("o.npy"))
        for _ in range(2):  # the file is not there yet, then it is
            run("run", *words, "--o", self.path("o.npy"))
            self.assertTrue(os.path.islink(self.path("o.npy")))
            self.assertEqual(read_npy(self.path("there.npy"))[1], (self.B, self.SQ, self.H, self.D))
        self.assertEqual(self.files(), ["k.npy", "o.npy", "q.npy", "there.npy", "v.npy"])

    def test_masks(self):
        values, words = self.qkv()
        diagonal = self.SK - self.SQ
        self.both(words + ["--causal"], attention(*values, self.shape(), mask=lambda i, j: j <= i + diagonal))
        self.both(
            words + ["--window", "2,1"],
            attention(*values, self.shape(), mask=lambda i, j: -2 <= j - i - diagonal <= 1),
        )
        self.both(words + ["--window", "-1,0"], attention(*values, self.shape(), mask=lambda i, j: j <= i + diagonal))

    def test_scale_and_softcap(self):
        values, words = self.qkv()
        self.both(
            words + ["--scale", "0.3", "--softcap", "1.5"], attention(*values, self.shape(), scale=0.3, softcap=1.5)
        )
        self.both(words + ["--scale", "0"], attention(*values, self.shape(), scale=0))
        self.both(words + ["--scale", "-1"], attention(*values, self.shape(), scale=-1))

    def test_grouped_heads(self):
        self.H = 4
        values, words = self.qkv(heads_k=2)
        self.both(words, attention(*values, self.shape(), heads_k=2))

    def test_bias_alibi_and_sinks(self):
        values, words = self.qkv()
        bias, slopes, sinks = self.numbers(self.SQ * self.SK), [0.5, 0.125], [1.0, -0.5]
        write_npy(self.path("bias.npy"), bias, (1, 1, self.SQ, self.SK))
        write_npy(self.path("alibi.npy"), slopes, (self.H,))
        write_npy(self.path("sinks.npy"), sinks, (self.H,))
        for option, value in [("bias", {"bias": bias}), ("alibi", {"slopes": slopes}), ("sinks", {"sinks": sinks})]:
            self.both(words + ["--" + option, self.path(option + ".npy")], attention(*values, self.shape(), **value))

    def test_slices_are_a_block_mask(self):
        values, words = self.qkv()
        write_npy(self.path("slices.npy"), [0, 3, 0, 4, 0, 3, 5, 4, 7, 1], (2, 5), kind="i4")
        expected = attention(
            *values, self.shape(), mask=lambda i, j: (i < 3 and j < 4) or (i >= 3 and j >= 4 and j - 7 <= i - 5)
        )
        self.both(words + ["--slices", self.path("slices.npy")], expected)

    def test_used_lengths_of_either_integer_type(self):
        values, words = self.qkv()
        expected = attention(*values, self.shape(), mask=lambda i, j: j < 3)
        for kind in ("i4", "i8"):
            write_npy(self.path("used.npy"), [3, 3], (2,), kind=kind)
            self.both(words + ["--seqused-k", self.path("used.npy")], expected)

    def test_packed_sequences(self):
        self.B, self.SQ, self.SK = 1, 9, 9
        values, words = self.qkv()
        write_npy(self.path("cu.npy"), [0, 4, 4, 9], (4,), kind="i8")
        same = lambda i, j: (i < 4) == (j < 4)
        expected = attention(*values, self.shape(), mask=same)
        self.both(words + ["--cu-seqlens-q", self.path("cu.npy"), "--cu-seqlens-k", self.path("cu.npy")], expected)

    def test_a_paged_cache(self):
        values, words = self.qkv()
        self.SK = 6
        pages = {
            "k": [],
            "v": [],
        }  # page p of 2 keys: sequence p // 3, keys 2 (p % 3) on, stored in the order of `table`
        table = [4, 0, 5, 2, 1, 3]
        row = self.H * self.D
        kept = {"k": [], "v": []}
        for n, name in enumerate("kv"):
            for b in range(self.B):
                kept[name] += values[1 + n][b * 7 * row : (b * 7 + 6) * row]
            pages[name] = [0.0] * len(kept[name])
            for logical, physical in enumerate(table):
                pages[name][physical * 2 * row : (physical + 1) * 2 * row] = kept[name][
                    logical * 2 * row : (logical + 1) * 2 * row
                ]
            write_npy(self.path(name + ".npy"), pages[name], (6, 2, self.H, self.D))
        write_npy(self.path("table.npy"), table, (self.B, 3), kind="i4")
        expected = attention(values[0], kept["k"], kept["v"], self.shape())
        self.both(words + ["--page-table", self.path("table.npy")], expected)

    def test_gradients(self):
        _, words = self.qkv()
        write_npy(
            self.path("dout.npy"), self.numbers(self.B * self.SQ * self.H * self.D), (self.B, self.SQ, self.H, self.D)
        )
        write_npy(self.path("bias.npy"), self.numbers(self.SQ * self.SK), (1, 1, self.SQ, self.SK))
        write_npy(self.path("sinks.npy"), [0.5, -0.5], (2,))
        words += [
            "--dout",
            self.path("dout.npy"),
            "--bias",
            self.path("bias.npy"),
            "--sinks",
            self.path("sinks.npy"),
            "--causal",
        ]
        dq, dk, dv, dbias, dsinks = self.both(words, names=("dq", "dk", "dv", "dbias", "dsinks"))
        # By finite differences: the change of sum(o * dout) with one element of q, and with a sink.
        q = read_values(self.path("q.npy"))
        dout = read_values(self.path("dout.npy"))
        step = 1 / 64
        for at in (0, 17, len(q) - 1):
            change = []
            for sign in (1, -1):
                moved = q[:at] + [q[at] + sign * step] + q[at + 1 :]
                write_npy(self.path("q.npy"), moved, (self.B, self.SQ, self.H, self.D))
                forward = [word for n, word in enumerate(words) if word != "--dout" and words[n - 1] != "--dout"]
                o, _ = self.outputs("--device", "reference", *forward)
                change.append(sum(x * y for x, y in zip(o, dout)))
            self.assertAlmostEqual((change[0] - change[1]) / (2 * step), dq[at], delta=2e-3)
        self.assertEqual(len(dbias), self.SQ * self.SK)
        self.assertEqual(len(dsinks), self.H)

    def test_dropout_depends_on_seed_and_offset_alone(self):
        _, words = self.qkv()
        o = [self.both(words + ["--dropout", text])[0] for text in ("0.5,1,2", "0.5,1,2", "0.5,1,3", "0.5,2,2")]
        self.assertEqual(o[0], o[1])
        self.assertNotEqual(o[0], o[2])
        self.assertNotEqual(o[0], o[3])

    def test_lengths_that_do_not_fit_are_refused(self):
        _, words = self.qkv()
        write_npy(self.path("used.npy"), [3, 3, 3], (3,), kind="i4")
        self.refused(
            "run",
            *words,
            "--o",
            self.path("o.npy"),
            "--seqused-k",
            self.path("used.npy"),
            says=["--seqused-k", "[3]", "expected [2]"],
        )
        write_npy(self.path("used.npy"), [3, 2**40], (2,), kind="i8")
        self.refused("run", *words, "--o", self.path("o.npy"), "--seqused-k", self.path("used.npy"), says="32 bits")
        write_npy(self.path("used.npy"), [3, 99], (2,), kind="i4")
        self.refused("run", *words, "--o", self.path("o.npy"), "--seqused-k", self.path("used.npy"), says="seqused_k")
        write_npy(self.path("slices.npy"), [0] * 8, (2, 4), kind="i4")
        self.refused(
            "run", *words, "--o", self.path("o.npy"), "--slices", self.path("slices.npy"), says="expected [n, 5]"
        )

    def test_the_report_names_what_was_written(self):
        _, words = self.qkv(kind="f2")
        report = json.loads(
            run("run", "--device", "reference", *words, "--o", self.path("o.npy"), "--o-dtype", "f32", "--json")
        )
        self.assertEqual(
            report,
            {
                "schema": "flashattn.run/1",
                "device": "reference",
                "outputs": [
                    {
                        "name": "o",
                        "path": self.path("o.npy"),
                        "dtype": "f32",
                        "shape": [self.B, self.SQ, self.H, self.D],
                    }
                ],
            },
        )


class Schema(Case):
    """The keys that docs/cli.md promises, in their order."""

    def test_info(self):
        report = json.loads(run("info", "--json"))
        self.assertEqual(list(report), ["schema", "version", "devices", "cuda_error"])
        self.assertEqual(report["schema"], "flashattn.info/1")
        self.assertEqual(
            list(report["devices"][0]),
            ("type index name isa features num_cores num_threads l1_bytes l2_bytes l3_bytes memory_bytes tuning").split(),
        )
        self.assertEqual(report["devices"][0]["type"], "cpu")
        self.assertIn(report["devices"][0]["isa"], run("info"))

    def test_info_measured(self):
        report = json.loads(run("info", "--measure", "--threads", "1", "--read-bytes", "4M", "--json"))
        self.assertEqual(list(report), ["schema", "version", "peaks", "devices", "cuda_error"])
        peaks = report["peaks"]
        self.assertEqual(list(peaks), "threads fma_name fma_gflops amx_gflops bf16_gflops read_bytes read_gbps".split())
        self.assertEqual((peaks["threads"], peaks["read_bytes"]), (1, 4 << 20))
        self.assertGreater(peaks["fma_gflops"], 0)
        self.assertGreater(peaks["read_gbps"], 0)
        tier = report["devices"][0]["isa"]
        self.assertEqual(peaks["amx_gflops"] > 0, tier.startswith("amx"))
        self.assertEqual(peaks["bf16_gflops"] > 0, tier == "avx512-bf16")
        self.assertIn("read-bytes", run("info", "--measure", "--read-bytes", "10", expect=2))

    def test_explain(self):
        report = json.loads(run("explain", "--device", "reference", "--seqlen", "64", "--json"))
        self.assertEqual(
            list(report),
            (
                "schema pass kernel reason tile_q tile_k num_splits num_threads num_tasks scratch_bytes "
                "workspace_bytes flops bytes"
            ).split(),
        )
        self.assertEqual(report["flops"], 4 * 64 * 64 * 64 * 8)

    def test_check(self):
        report = json.loads(run("check", "--device", "reference", "--group", "causal", "--dtype", "f32", "--json"))
        self.assertEqual(
            list(report),
            ("schema device device_name isa threads quick seed dtypes groups failures passed failed skipped").split(),
        )
        self.assertEqual(list(report["groups"][0]), "group passed failed skipped worst worst_of skip_reason".split())
        self.assertGreater(report["passed"], 0)
        self.assertEqual(report["passed"], report["groups"][0]["passed"])
        self.assertEqual(report["failures"], [])

    def test_no_progress_bar_where_there_is_no_terminal(self):
        for words in (["check", "--device", "reference", "--group", "causal"], BENCH):
            done = subprocess.run([COMMAND[0], *words], capture_output=True, timeout=TIMEOUT_S)
            self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_a_progress_bar_on_a_terminal(self):
        terminal, end = pty.openpty()
        words = ["check", "--device", "reference", "--group", "causal", "--dtype", "f32"]
        done = subprocess.run([COMMAND[0], *words], stdout=subprocess.PIPE, stderr=end, timeout=TIMEOUT_S)
        os.close(end)
        bar = os.read(terminal, 65536).decode()
        os.close(terminal)
        self.assertEqual(done.returncode, 0)
        self.assertIn("0/", bar)
        self.assertTrue(bar.endswith("\r\033[K"), bar)  # wiped
        self.assertNotIn("\033", done.stdout.decode())

    def test_machine_output_alone_is_on_stdout(self):
        small = [*BENCH, "--pass", "forward", "--dtype", "f32", "--mask", "full"]
        self.assertEqual(json.loads(run(*small, "--json", "-"))["num_rows"], 2)
        self.assertTrue(run(*small, "--csv", "-").startswith("pass,dtype,"))


class Quick(Case):
    """Slow: in ctest it is a test of its own, with the label slow."""

    def test_bench_quick_is_right_everywhere(self):
        # Where CI is set, the demo runs the whole table.
        some = ["--dtype", "f32", "--head-dim", "64"] if os.environ.get("CI") else []
        run("bench", "--quick", *some, "--json", self.path("b.json"))
        with open(self.path("b.json")) as file:
            report = json.load(file)
        self.assertEqual(report["num_wrong"], 0)
        self.assertTrue(report["quick"])
        self.assertTrue(all(row["standard"] for row in report["rows"]))

    def test_tune_measures_and_its_file_is_used(self):
        file = self.path("tune.txt")
        words = ["tune", "--threads", "1", "--seconds", "1", "--isa", "avx512", "--json"]
        report = json.loads(run(*words, "--file", file))
        self.assertEqual(list(report), ["schema", "device_name", "isa", "threads", "choices", "stored"])
        self.assertTrue(report["stored"])
        self.assertGreaterEqual(len(report["choices"]), 6)
        for choice in report["choices"]:
            self.assertEqual(list(choice), "name default default_ms found found_ms num_tried".split())
            self.assertLessEqual(choice["found_ms"], choice["default_ms"])
        os.environ["FLASH_ATTN_TUNE_FILE"] = file
        try:
            self.assertEqual(json.loads(run("info", "--json"))["devices"][0]["tuning"], "measured")
            self.assertIn("measured on this machine", run("info"))
        finally:
            del os.environ["FLASH_ATTN_TUNE_FILE"]
        self.assertFalse(json.loads(run(*words, "--dry-run"))["stored"])
        self.refused("tune", "--dry-run", "--file", file, says="--file")
        for form in ([], ["--json"]):
            self.refused("tune", "--file", self.path("missing/tune.txt"), *form, says="missing/tune.txt")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    COMMAND[0] = os.path.abspath(sys.argv.pop(1))
    unittest.main()
