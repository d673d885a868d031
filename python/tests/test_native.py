"""The structs are the header's, field by field; errors are the library's own sentences."""

import ctypes
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import flashattn
import numpy as np
import pytest
from flashattn import _native, _scratch
from flashattn._call import Call

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include"
STRUCTS = {
    "flash_attn_tensor": _native.Tensor, "flash_attn_device": _native.Device, "flash_attn_options": _native.Options,
    "flash_attn_device_info": _native.DeviceInfo, "flash_attn_slices": _native.Slices, "flash_attn_pages": _native.Pages,
    "flash_attn_dropout": _native.Dropout, "flash_attn_descale": _native.Descale, "flash_attn_problem": _native.Problem,
    "flash_attn_grads": _native.Grads, "flash_attn_exec": _native.Exec, "flash_attn_explanation": _native.Explanation,
    "flash_attn_rotary": _native.Rotary, "flash_attn_append": _native.Append, "flash_attn_partial": _native.Partial,
    "flash_attn_ring_share": _native.RingShare, "flash_attn_transport": _native.Transport, "flash_attn_ring": _native.Ring}


def test_structs_are_laid_out_as_the_header_says(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not HEADER.is_dir():
        pytest.skip("needs a C compiler and include/flashattn.h")
    lines = []
    for name, ours in STRUCTS.items():
        lines.append(f'printf("{name} - %zu 0\\n", sizeof({name}));')
        lines += [f'printf("{name} {field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
                  for field, _ in ours._fields_]
    source = tmp_path / "probe.c"
    source.write_text('#include "flashattn.h"\n#include <stdio.h>\nint main(void)\n{\n' + "\n".join(lines) + "\n}\n")
    subprocess.run([compiler, f"-I{HEADER}", str(source), "-o", str(tmp_path / "probe")], check=True)
    told = subprocess.run([str(tmp_path / "probe")], check=True, capture_output=True, text=True).stdout.split("\n")
    for line in filter(None, told):
        name, field, at, size = line.split()
        ours = STRUCTS[name]
        if field == "-":
            assert ctypes.sizeof(ours) == int(at), name
        else:
            assert (getattr(ours, field).offset, getattr(ours, field).size) == (int(at), int(size)), f"{name}.{field}"


def test_no_struct_and_no_field_of_the_header_is_missing():
    if not HEADER.is_dir():
        pytest.skip("needs include/flashattn.h")
    text = re.sub(r"/\*.*?\*/", "", (HEADER / "flashattn.h").read_text(), flags=re.S)
    found = {name: body for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, flags=re.S)}
    # A slice is five int32, filled as an array; tuning is the command's.
    others = {"flash_attn_slice", "flash_attn_tune_choice"}
    assert set(found) - others == set(STRUCTS)
    for name, body in found.items():
        fields = [re.search(r"(\w+)(\[\d+\])?\s*$", part).group(1) for line in body.split(";") if line.strip()
                  for part in line.split(",")]
        if name in STRUCTS:
            assert fields == [field for field, _ in STRUCTS[name]._fields_], name


def test_every_status_is_its_own_exception():
    assert issubclass(flashattn.InvalidError, ValueError) and issubclass(flashattn.InvalidError, flashattn.FlashAttnError)
    assert issubclass(flashattn.UnsupportedError, NotImplementedError)
    assert issubclass(flashattn.NoMemoryError, MemoryError)
    for status, error in enumerate(_native._ERRORS):
        if error is None:
            _native.check(status)
            continue
        with pytest.raises(error):
            _native.check(status)
    with pytest.raises(flashattn.FlashAttnError):
        _native.check(99)


def test_a_refusal_names_the_field_and_leaves_the_output_alone():
    q, k = np.ones((1, 4, 3, 8), np.float32), np.ones((1, 4, 2, 8), np.float32)
    out = np.full((1, 4, 3, 8), 7.0, np.float32)
    with pytest.raises(flashattn.InvalidError, match="heads"):
        Call(q, k, k).forward(out)
    assert (out == 7).all()
    Call(q, k[:, :, :1], k[:, :, :1]).forward(out)  # the next call works
    assert np.allclose(out, 1)


def test_no_device_is_an_error_of_its_own():
    with pytest.raises(flashattn.NoDeviceError):
        flashattn.device_info(_native.CUDA, 1000)


def test_each_thread_has_its_own_message():
    caught = {}

    def fail(n):
        q = np.ones((1, 2, 2 + n, 4), np.float32)
        for _ in range(50):
            try:
                flashattn.flash_attn_func(q, np.ones((1, 2, 1, 5 + n), np.float32), np.ones((1, 2, 1, 4), np.float32))
            except flashattn.InvalidError as error:
                caught.setdefault(n, set()).add(str(error))

    threads = [threading.Thread(target=fail, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(len(caught[n]) == 1 and str(5 + n) in caught[n].copy().pop() for n in range(4)), caught


def test_versions_agree():
    text = (HEADER / "flashattn.h").read_text() if HEADER.is_dir() else None
    if text is None:
        pytest.skip("needs include/flashattn.h")
    parts = [re.search(rf"VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH")]
    assert flashattn.__version__ == ".".join(parts)
    info = flashattn.device_info()
    assert info["num_cores"] >= 1 and info["isa"]


def test_pips_compiler_of_gpu_kernels_is_found_for_pytorchs_version_of_cuda(tmp_path, monkeypatch):
    for folder, name in ("cu13", "libnvrtc.so.13"), ("cuda_nvrtc", "libnvrtc.so.12"), ("cu13", "libcublas.so.12"):
        file = tmp_path / "nvidia" / folder / "lib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert _native.pip_nvrtc("13") == str(tmp_path / "nvidia/cu13/lib/libnvrtc.so.13")
    assert _native.pip_nvrtc("12") == str(tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    assert _native.pip_nvrtc("11") is None
    monkeypatch.setattr("sys.path", [])
    assert _native.pip_nvrtc("13") is None


def test_scratch_memory_comes_from_pytorch_and_goes_back(monkeypatch):
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 70, 4, 32)
    expected = Call(q, q, q, causal=True).forward()
    blocks, given_back = [], []

    def alloc(count, device):
        assert device == 3
        blocks.append(torch.empty(count, dtype=torch.uint8))
        return blocks[-1].data_ptr()

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", alloc)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", given_back.append)
    call = Call(q, q, q, causal=True)
    call.exec = _scratch.exec_of(None, 3)
    for a, b in zip(call.forward(), expected):
        assert torch.equal(a, b)
    assert len(blocks) == 1 and given_back == [blocks[0].data_ptr()]
    call.forward()
    assert len(blocks) == 2 and given_back == [block.data_ptr() for block in blocks]

    def fail(count, device):
        raise torch.OutOfMemoryError(f"no {count} bytes on {device}")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", fail)
    out = torch.full_like(q, 7.0)
    with pytest.raises(torch.OutOfMemoryError, match="bytes on 3"):
        call.forward(out)
    assert (out == 7).all() and len(given_back) == 2
    with pytest.raises(flashattn.InvalidError, match="num_threads is -1"):  # and not the error of the call before
        call.exec.num_threads = -1
        call.forward(out)
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", alloc)
    call.exec.num_threads = 0
    assert torch.equal(call.forward(out)[0], expected[0])
