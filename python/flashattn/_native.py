"""The C library: where it is, its structs as include/flashattn.h has them, and its errors as exceptions."""

import ctypes
import importlib.util
import os
import pathlib
import struct
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_bool, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t
from ctypes import c_uint64, c_void_p

F32, F16, BF16, F8E4M3 = range(4)
DTYPE_NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
CPU, CUDA, REFERENCE = range(3)
MASK_NONE, MASK_CAUSAL, MASK_WINDOW = range(3)
FORWARD, BACKWARD = range(2)


# ---- structs -------------------------------------------------------------------------------------------------------


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("reserved", c_int32), ("shape", c_int64 * 4),
                ("stride", c_int64 * 4)]


class Device(Structure):
    _fields_ = [("type", c_int32), ("index", c_int32)]


class Options(Structure):
    _fields_ = [("num_threads", c_int32), ("max_isa", c_int32), ("parallel_for", c_void_p), ("pool", c_void_p),
                ("no_amx_split", c_bool), ("use_openmp", c_bool), ("kernel", c_char_p), ("kernel_folder", c_char_p),
                ("nvrtc_path", c_char_p), ("tune_file", c_char_p), ("reserved", c_uint64 * 4)]


class DeviceInfo(Structure):
    _fields_ = [("name", c_char * 64), ("isa", c_char * 16), ("features", c_char * 256), ("num_cores", c_int32),
                ("num_threads", c_int32), ("l1_bytes", c_int64), ("l2_bytes", c_int64), ("l3_bytes", c_int64),
                ("memory_bytes", c_int64), ("tuning", c_int32), ("reserved0", c_int32), ("reserved", c_uint64 * 7)]


class Slices(Structure):
    _fields_ = [("list", c_void_p), ("count", c_int32), ("reserved", c_int32), ("offsets", c_void_p)]


class Pages(Structure):
    _fields_ = [("table", c_void_p), ("row_stride", c_int64), ("pages_per_seq", c_int32), ("reserved", c_int32)]


class Dropout(Structure):
    _fields_ = [("p", c_float), ("reserved", c_int32), ("seed", c_uint64), ("offset", c_uint64)]


class Descale(Structure):
    _fields_ = [("q", Tensor), ("k", Tensor), ("v", Tensor)]


class Problem(Structure):
    _fields_ = [("device", Device), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("o", Tensor), ("lse", Tensor),
                ("scale", c_float), ("softcap", c_float), ("mask", c_int32), ("window_left", c_int32),
                ("window_right", c_int32), ("bias", Tensor), ("alibi_slopes", Tensor), ("sinks", Tensor),
                ("cu_seqlens_q", c_void_p), ("cu_seqlens_k", c_void_p), ("seqused_q", c_void_p),
                ("seqused_k", c_void_p), ("leftpad_k", c_void_p), ("cache_batch_idx", c_void_p), ("batch", c_int32),
                ("max_seqlen_q", c_int32), ("max_seqlen_k", c_int32), ("num_splits", c_int32), ("pages", Pages),
                ("slices", Slices), ("dropout", Dropout), ("descale", Descale), ("deterministic", c_bool),
                ("reserved", c_uint64 * 8)]


class Grads(Structure):
    _fields_ = [("dout", Tensor), ("dq", Tensor), ("dk", Tensor), ("dv", Tensor), ("dbias", Tensor),
                ("dsinks", Tensor), ("reserved", c_uint64 * 8)]


Allocate = CFUNCTYPE(c_void_p, c_void_p, c_size_t)


class Exec(Structure):
    _fields_ = [("stream", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_size_t),
                ("num_threads", c_int32), ("reserved0", c_int32), ("allocate", Allocate), ("allocator", c_void_p),
                ("reserved", c_uint64 * 6)]


class Explanation(Structure):
    _fields_ = [("kernel", c_char * 64), ("reason", c_char * 256), ("tile_q", c_int32), ("tile_k", c_int32),
                ("num_splits", c_int32), ("num_threads", c_int32), ("num_tasks", c_int64), ("scratch_bytes", c_int64),
                ("workspace_bytes", c_int64), ("flops", c_double), ("bytes", c_double), ("reserved", c_uint64 * 8)]


class Rotary(Structure):
    _fields_ = [("cos", Tensor), ("sin", Tensor), ("interleaved", c_bool), ("reserved", c_uint64 * 2)]


class Append(Structure):
    _fields_ = [("device", Device), ("k_new", Tensor), ("v_new", Tensor), ("k_cache", Tensor), ("v_cache", Tensor),
                ("cache_seqlens", c_void_p), ("cache_batch_idx", c_void_p), ("leftpad_k", c_void_p), ("pages", Pages),
                ("rotary", Rotary), ("q", Tensor), ("q_out", Tensor), ("q_at_end", c_bool), ("reserved", c_uint64 * 8)]


class Partial(Structure):
    _fields_ = [("o", Tensor), ("lse", Tensor)]


class RingShare(Structure):
    _fields_ = [("rows", c_int64), ("begin", c_int64 * 2), ("count", c_int64 * 2), ("step", c_int64)]


class Transport(Structure):
    _fields_ = [("begin", c_void_p), ("wait", c_void_p), ("exchange_host", c_void_p), ("user", c_void_p),
                ("reserved", c_uint64 * 4)]


class Ring(Structure):
    _fields_ = [("rank", c_int32), ("ranks", c_int32), ("layout", c_int32), ("reserved0", c_int32), ("seqlen_q", c_int64),
                ("seqlen_k", c_int64), ("transport", Transport), ("reserved", c_uint64 * 8)]


# A tensor's bytes at once: filling ctypes fields one by one would cost more than a small attention.
pack_tensor = struct.Struct("<Qi4x4q4q").pack_into
assert struct.calcsize("<Qi4x4q4q") == ctypes.sizeof(Tensor)


# ---- errors --------------------------------------------------------------------------------------------------------


class FlashAttnError(RuntimeError):
    """A call failed; the message is the library's own sentence."""


class InvalidError(FlashAttnError, ValueError):
    """An argument means nothing."""


class UnsupportedError(FlashAttnError, NotImplementedError):
    """A valid problem for which this device has no kernel."""


class NoDeviceError(FlashAttnError):
    """No such device, or its driver is missing."""


class NoMemoryError(FlashAttnError, MemoryError):
    """Host or device memory ran out."""


class CompileError(FlashAttnError):
    """A GPU kernel could not be built."""


class LaunchError(FlashAttnError):
    """The GPU driver refused or failed a launch."""


class TransportError(FlashAttnError):
    """Another rank failed, or what moves the bytes between ranks."""


_ERRORS = (None, InvalidError, UnsupportedError, NoDeviceError, NoMemoryError, CompileError, LaunchError, TransportError)


def check(status):
    """Raise what a flash_attn_status other than OK means."""
    if status:
        error = _ERRORS[status] if 0 < status < len(_ERRORS) else FlashAttnError
        raise error(lib.flash_attn_last_error().decode("utf-8", "replace"))


# ---- the library ---------------------------------------------------------------------------------------------------


def _load():
    # Beside this file in an installed package. FLASHATTN_LIBRARY names another build, for developers.
    here = pathlib.Path(__file__).resolve().parent
    chosen = os.environ.get("FLASHATTN_LIBRARY")
    paths = [pathlib.Path(chosen)] if chosen else sorted(here.glob("libflashattn.so*")) + sorted(
        here.glob("libflashattn*.dylib"))
    if not paths:
        raise ImportError(f"flashattn: the C library is not in {here}; install the package with pip, or set "
                          "FLASHATTN_LIBRARY to a libflashattn.so")
    return ctypes.CDLL(str(paths[0]))


lib = _load()

_PROTOTYPES = {
    "flash_attn_status_string": (c_char_p, [c_int32]),
    "flash_attn_last_error": (c_char_p, []),
    "flash_attn_version": (c_int32, []),
    "flash_attn_create": (c_int32, [POINTER(c_void_p), POINTER(Options)]),
    "flash_attn_destroy": (None, [c_void_p]),
    "flash_attn_get_device_info": (c_int32, [c_void_p, Device, POINTER(DeviceInfo)]),
    # Structs go as plain addresses: quicker than typed pointers on the path that is hot.
    "flash_attn_forward": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "flash_attn_backward": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flash_attn_workspace_size": (c_int32, [c_void_p, c_void_p, c_int32, POINTER(c_size_t)]),
    "flash_attn_prepare": (c_int32, [c_void_p, c_void_p, c_int32]),
    "flash_attn_explain": (c_int32, [c_void_p, c_void_p, c_int32, POINTER(Explanation)]),
    "flash_attn_append_kv": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "flash_attn_merge": (c_int32, [c_void_p, Device, c_void_p, c_int32, c_void_p, c_void_p]),
    "flash_attn_ring_get_share": (c_int32, [c_int32, c_int32, c_int32, c_int64, POINTER(RingShare)]),
    "flash_attn_ring_forward": (c_int32, [c_void_p, c_void_p, POINTER(Ring), c_void_p]),
    "flash_attn_ring_backward": (c_int32, [c_void_p, c_void_p, c_void_p, POINTER(Ring), c_void_p]),
    "flash_attn_ring_workspace_size": (c_int32, [c_void_p, c_void_p, POINTER(Ring), c_int32, POINTER(c_size_t)]),
}
for _name, (_result, _arguments) in _PROTOTYPES.items():
    _function = getattr(lib, _name)
    _function.restype, _function.argtypes = _result, _arguments

version = "{}.{}.{}".format(*divmod(lib.flash_attn_version() // 100, 100), lib.flash_attn_version() % 100)


context = None  # what every call runs on; None: the one that the library makes itself


def pip_nvrtc(cuda_major):
    """The compiler of GPU kernels that pip has installed for this major version of CUDA, as it does with PyTorch; None if there is
    none. On a machine without CUDA's toolkit the loader finds no other."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = nvidia.submodule_search_locations if nvidia else None
    found = [file for folder in folders or () for file in pathlib.Path(folder).glob(f"*/lib/libnvrtc.so.{cuda_major}")]
    return str(min(found)) if found else None


def share_with_torch(cuda_version):
    """From now on run on the threads of the OpenMP runtime that the process has loaded, which are PyTorch's. Two pools
    would be in each other's way: the threads of each wait a while for more work before they sleep. Likewise its compiler of
    GPU kernels. cuda_version: torch.version.cuda, None in a PyTorch without CUDA."""
    global context
    made = c_void_p()
    nvrtc = pip_nvrtc(cuda_version.split(".")[0]) if cuda_version else None
    check(lib.flash_attn_create(byref(made), byref(Options(use_openmp=True, nvrtc_path=nvrtc and os.fsencode(nvrtc)))))
    context = made.value


def device_info(device=CPU, index=0):
    """What a device offers and which tier is used: a dict with the fields of flash_attn_device_info."""
    info = DeviceInfo()
    check(lib.flash_attn_get_device_info(context, Device(device, index), byref(info)))
    fields = {name: getattr(info, name) for name, _ in DeviceInfo._fields_ if not name.startswith("reserved")}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in fields.items()}
