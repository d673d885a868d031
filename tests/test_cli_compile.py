#!/usr/bin/env python3
"""Tests of `flashattn compile`, with Python's standard library alone. Skipped where there is no NVRTC.

python3 tests/test_cli_compile.py path/to/flashattn [FOLDER] [unittest options]

FOLDER: of the emulated NVRTC, or empty. With it nothing is compiled where only names count; NVRTC itself builds these kernels in
test_cuda_compile.
"""

import os
import subprocess
import sys
import unittest

from cli_support import COMMAND, TIMEOUT_S, Case, write_npy

PROBLEM = "--arch 90 --causal --forward-only".split()
BF16 = ["--dtype", "bf16"]
NAMES = {}  # what is set where only names count
CALLS = [(1, 1, 1), (3, 5000, 1), (16, 300, 7), (40, 40, 2), (100, 70000, 1), (128, 128, 300), (129, 131, 3), (700, 700, 1), (1500, 3000, 40), (5000, 5000, 1)]
GROUPS = [(8, 70, 4), (2, 60000, 8), (16, 150, 1), (64, 9000, 3), (135, 2998, 1), (140, 140, 9), (201, 3567, 32), (244, 4042, 30), (400, 30000, 9), (426, 5396, 2), (1025, 9000, 1)]  # whose heads may share tiles


class Compile(Case):
    def compile(self, folder, *words, head_dim=64, environment=NAMES):
        """The kernels that are in the folder then."""
        done = subprocess.run([COMMAND[0], "compile", "--out", self.path(folder), *PROBLEM, "--head-dim", str(head_dim), *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT_S,
                              env={**os.environ, **environment})
        if "NVRTC, the compiler of GPU kernels, was not found" in done.stderr:
            self.skipTest(done.stderr.strip())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return set(os.listdir(self.path(folder)))

    def test_all_lengths_are_served(self):
        every = self.compile("every", *BF16)
        for queries, keys, batch in CALLS:
            call = [*BF16, "--seqlen-q", queries, "--seqlen-k", keys, "--batch", batch]
            self.assertEqual(self.compile("every", *call), every, call)  # nothing is added
        for heads_k in (1, 4):
            grouped = [*BF16, "--heads", 8, "--heads-k", heads_k]
            every_group = self.compile(f"groups {heads_k}", *grouped)
            for queries, keys, batch in GROUPS:
                call = [*grouped, "--seqlen-q", queries, "--seqlen-k", keys, "--batch", batch]
                self.assertEqual(self.compile(f"groups {heads_k}", *call), every_group, call)

        one = self.compile("one", *BF16, "--seqlen", 700)
        self.assertLess(one, every)  # such calls alone
        self.assertLess(one, self.compile("one", *BF16, "--seqlen", 1))  # and what is there stays

    def test_latent_attention_and_wide_heads_have_kernels_of_their_own(self):
        wide = [*BF16, "--heads", 16, "--heads-k", 1, "--head-dim-v", 512, "--seqlen-q", 1, "--seqlen-k", 48]
        for head_dim, words, kernel in ((576, [], b"forward_sm80"), (512, [], b"forward_wide_sm90"), (512, ["--latent"], b"forward_latent_sm90"), (576, ["--latent"], b"forward_latent_sm90")):
            folder = f"{head_dim} {words}"
            (name,) = self.compile(folder, *wide, *words, head_dim=head_dim, environment={})
            with open(os.path.join(self.path(folder), name), "rb") as cubin:
                self.assertIn(kernel, cubin.read())

    def test_a_scale_of_all_sequences_leaves_the_batch_free(self):
        write_npy(self.path("scale.npy"), [0.5], (1,))
        scaled = ["--dtype", "f8e4m3", "--descale-k", self.path("scale.npy")]
        every = self.compile("every", *scaled)
        self.assertEqual(self.compile("every", *scaled, "--seqlen-q", 5, "--seqlen-k", 417, "--batch", 40), every)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    COMMAND[0] = os.path.abspath(sys.argv.pop(1))
    if len(sys.argv) > 1 and (not sys.argv[1] or os.path.isdir(sys.argv[1])):
        emulated = sys.argv.pop(1)
        if emulated:
            NAMES.update(LD_LIBRARY_PATH=emulated, EMULATOR_TEXT="1")
    unittest.main()
