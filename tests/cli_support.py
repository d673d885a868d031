"""What the tests of the `flashattn` command share: running it, .npy files written and read apart from its own code, and
attention in a few lines of Python, so that expected values do not come from the library."""

import math
import os
import pathlib
import random
import struct
import subprocess
import tempfile
import unittest

COMMAND = [None]  # the path to flashattn, from the command line
TIMEOUT_S = 300
BENCH = "bench --device reference --seqlen 32,48 --head-dim 16 --heads 2 --seconds 0".split()  # a small one


def run(*words, expect=0):
    """Run the command; return its stdout, or stderr if it is expected to fail."""
    done = subprocess.run([COMMAND[0], *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != expect or (expect == 2 and done.stdout):
        raise AssertionError(f"{words}: exit status {done.returncode}, expected {expect}\n{done.stdout}{done.stderr}")
    return done.stdout if expect == 0 else done.stderr


# ---- .npy, written and read apart from the command's own code ----

SIZES = {"f4": 4, "f2": 2, "V2": 2, "V1": 1, "u2": 2, "u1": 1, "i4": 4, "i8": 8, "f8": 8}
CODES = {"f4": "f", "f2": "e", "u2": "H", "u1": "B", "i4": "i", "i8": "q", "f8": "d"}


def bf16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def pack(values, kind, order="<"):
    if kind == "V2":
        return struct.pack(f"<{len(values)}H", *map(bf16_bits, values))
    return struct.pack(f"{order}{len(values)}{CODES[kind]}", *values)


def fortran(values, shape):
    """C-ordered values in Fortran order."""
    out = []
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    for n in range(math.prod(shape)):
        at = 0
        for dim, stride in zip(shape, strides):
            at += n % dim * stride
            n //= dim
        out.append(values[at])
    return out


def npy(header, data, version=1):
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode() + data


def write_npy(path, values, shape, kind="f4", version=1, in_fortran_order=False, order="<"):
    header = f"{{'descr': '{order}{kind}', 'fortran_order': {in_fortran_order}, 'shape': {tuple(shape)!r}, }}\n"
    values = fortran(values, shape) if in_fortran_order else values
    with open(path, "wb") as file:
        file.write(npy(header, pack(values, kind, order), version))


def read_npy(path):
    """(descr, shape, values)"""
    with open(path, "rb") as file:
        raw = file.read()
    assert raw[:8] == b"\x93NUMPY\x01\x00", raw[:8]
    length = struct.unpack("<H", raw[8:10])[0]
    assert (10 + length) % 64 == 0, "elements are not aligned"
    header = eval(raw[10 : 10 + length].decode(), {"__builtins__": {}})
    assert not header["fortran_order"]
    data, kind = raw[10 + length :], header["descr"][1:]
    count = math.prod(header["shape"])
    assert len(data) == count * SIZES[kind]
    if kind == "V2":
        return header["descr"], header["shape"], [bf16_value(b) for b in struct.unpack(f"<{count}H", data)]
    return header["descr"], header["shape"], list(struct.unpack(f"<{count}{CODES[kind]}", data))


def read_values(path):
    """Values of a float32 file that write_npy made."""
    with open(path, "rb") as file:
        raw = file.read()
    data = raw[10 + struct.unpack("<H", raw[8:10])[0] :]
    return list(struct.unpack(f"<{len(data) // 4}f", data))


# ---- attention in Python ----


def attention(
    q, k, v, shape, heads_k=None, mask=lambda i, j: True, scale=None, softcap=0, bias=None, slopes=None, sinks=None
):
    """Outputs [b, sq, hq, d] and LSE [b, hq, sq] as flat lists; shape = (b, sq, sk, hq, d)."""
    b, sq, sk, hq, d = shape
    hk = heads_k or hq
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = [0.0] * (b * sq * hq * d), [-math.inf] * (b * hq * sq)
    for n in range(b * hq * sq):
        entry, h, i = n // (hq * sq), n // sq % hq, n % sq
        scores = {}
        for j in range(sk):
            if not mask(i, j):
                continue
            q_at, k_at = ((entry * sq + i) * hq + h) * d, ((entry * sk + j) * hk + h * hk // hq) * d
            s = scale * sum(q[q_at + c] * k[k_at + c] for c in range(d))
            s = softcap * math.tanh(s / softcap) if softcap else s
            s += bias[i * sk + j] if bias else 0
            s -= slopes[h] * abs(i + sk - sq - j) if slopes else 0
            scores[j] = s
        logits = list(scores.values()) + ([sinks[h]] if sinks else [])
        if not logits:
            continue
        top = max(logits)
        lse[n] = top + math.log(sum(math.exp(s - top) for s in logits))
        for j, s in scores.items():
            for c in range(d):
                out[((entry * sq + i) * hq + h) * d + c] += (
                    math.exp(s - lse[n]) * v[((entry * sk + j) * hk + h * hk // hq) * d + c]
                )
    return out, lse


class Case(unittest.TestCase):
    """A scratch folder and small q, k, v in it."""

    B, SQ, SK, H, D = 2, 5, 7, 2, 4

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.random = random.Random(3)

    def path(self, name):
        return os.path.join(self.folder, name)

    def numbers(self, count):
        """Multiples of 1/16 below 4: the same in every type from 8 bits of significand on."""
        return [self.random.randint(-32, 31) / 16 for _ in range(count)]

    def qkv(self, heads_k=None, **how):
        """Write q.npy, k.npy, v.npy; return their values and the options that name them."""
        heads_k = heads_k or self.H
        shapes = [(self.B, self.SQ, self.H, self.D)] + [(self.B, self.SK, heads_k, self.D)] * 2
        values = [self.numbers(math.prod(shape)) for shape in shapes]
        words = []
        for name, value, shape in zip("qkv", values, shapes):
            write_npy(self.path(name + ".npy"), value, shape, **how)
            words += ["--" + name, self.path(name + ".npy")]
        return values, words

    def shape(self):
        return self.B, self.SQ, self.SK, self.H, self.D

    def near(self, found, expected, tolerance=2e-6):
        self.assertEqual(len(found), len(expected))
        for n, (x, y) in enumerate(zip(found, expected)):
            self.assertTrue(x == y or abs(x - y) <= tolerance * max(1, abs(y)), f"element {n}: {x}, expected {y}")

    def files(self):
        return sorted(os.listdir(self.folder))

    def contents(self):
        return {name: pathlib.Path(self.path(name)).read_bytes() for name in self.files() if os.path.isfile(self.path(name))}

    def refused(self, *words, says):
        """Exit status 2, a sentence with these words on stderr, no new file and none changed."""
        before = self.files(), self.contents()
        message = run(*words, expect=2)
        self.assertTrue(message.startswith("flashattn: "), message)
        self.assertEqual(message.count("\n"), 1, message)
        for part in [says] if isinstance(says, str) else says:
            self.assertIn(part, message)
        self.assertEqual((self.files(), self.contents()), before)
