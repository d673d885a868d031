"""What an array is to us: NumPy's, PyTorch's, or anything with __dlpack__ or __array_interface__. Nothing is copied."""

import ctypes
import sys

import numpy as np

from . import _native

try:
    import ml_dtypes
except ImportError:  # optional: only for bfloat16 and float8 in NumPy
    ml_dtypes = None

_BY_NAME = {name: code for code, name in enumerate(_native.DTYPE_NAMES)}
_BY_NAME["bool"], _BY_NAME["int32"], _BY_NAME["int64"] = -1, -2, -3


class View:
    """An array's memory: address, dtype code, shape and strides (in elements), device. `keep` owns the memory."""

    __slots__ = ("data", "dtype", "shape", "stride", "device", "index", "keep")

    def __init__(self, data, dtype, shape, stride, device=_native.CPU, index=0, keep=None):
        self.data, self.dtype, self.shape, self.stride = data, dtype, shape, stride
        self.device, self.index, self.keep = device, index, keep


def is_torch(array):
    """True for a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def wants_gradient(*arrays):
    """True if a gradient of one of these is recorded; others than torch tensors have none."""
    return any(is_torch(t) and t.requires_grad for t in arrays) and sys.modules["torch"].is_grad_enabled()


_torch_dtypes = {}


def _torch_dtype(dtype):
    torch = sys.modules["torch"]
    if not _torch_dtypes:
        for name, code in _BY_NAME.items():
            if hasattr(torch, name):
                _torch_dtypes[getattr(torch, name)] = code
    if dtype not in _torch_dtypes:
        raise _native.InvalidError(f"{dtype} is not supported: expected float32, float16 or bfloat16")
    return _torch_dtypes[dtype]


def _of_torch(tensor):
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise _native.UnsupportedError(f"device {tensor.device} is not supported: expected cpu or cuda")
    dtype = _torch_dtypes.get(tensor.dtype)
    if dtype is None:
        dtype = _torch_dtype(tensor.dtype)
    if tensor.is_neg():
        raise _native.InvalidError("the tensor is a view that negates what it shows: call resolve_neg() first")
    device, index = (_native.CPU, 0) if kind == "cpu" else (_native.CUDA, tensor.device.index or 0)
    return View(tensor.data_ptr(), dtype, tensor.shape, tensor.stride(), device, index, tensor)


_numpy_dtypes = {}  # by dtype object: its name is slow to ask for


def numpy_code(dtype):
    """The code of a NumPy dtype."""
    code = _numpy_dtypes.get(dtype)
    if code is None:
        code = _BY_NAME.get(dtype.name) if dtype.isnative else None
        if code is None:
            raise _native.InvalidError(f"dtype {dtype} is not supported: expected native float32, float16 or bfloat16")
        _numpy_dtypes[dtype] = code
    return code


def _of_numpy(array):
    code, bytes_each = numpy_code(array.dtype), array.itemsize
    stride = tuple([step // bytes_each for step in array.strides])
    if any([step % bytes_each for step in array.strides]):
        raise _native.InvalidError(f"strides {array.strides} are not multiples of the element size {bytes_each}")
    return View(array.__array_interface__["data"][0], code, array.shape, stride, keep=array)


# ---- DLPack, read from the capsule itself so that bfloat16 and strides come through without another library ----


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_DL_DTYPES = {(2, 32): _native.F32, (2, 16): _native.F16, (4, 16): _native.BF16, (0, 32): -2, (0, 64): -3, (6, 8): -1}
_DL_DEVICES = {1: _native.CPU, 2: _native.CUDA, 3: _native.CPU}  # 3: pinned host memory


def _of_dlpack(array):
    # The capsule stays unconsumed (its name unchanged), so its own destructor frees it; View.keep holds it till then.
    capsule = array.__dlpack__()
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    dtype, device = _DL_DTYPES.get((tensor.code, tensor.bits)), _DL_DEVICES.get(tensor.device_type)
    if dtype is None or tensor.lanes != 1:
        raise _native.InvalidError(f"DLPack dtype (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) is not "
                                   "supported: expected float32, float16 or bfloat16")
    if device is None:
        raise _native.UnsupportedError(f"DLPack device type {tensor.device_type} is not supported: expected CPU or CUDA")
    shape = tuple(tensor.shape[: tensor.ndim])
    stride, step = [], 1
    if tensor.strides:
        stride = tensor.strides[: tensor.ndim]
    else:
        for extent in reversed(shape):
            stride.insert(0, step)
            step *= extent
    return View((tensor.data or 0) + tensor.byte_offset, dtype, shape, tuple(stride), device, tensor.device_id,
                (capsule, array))


def view(array):
    """The memory of any supported array as a View; raises InvalidError with a sentence for what is not one."""
    if is_torch(array):
        return _of_torch(array)
    if isinstance(array, np.ndarray):
        return _of_numpy(array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    if hasattr(array, "__array_interface__"):
        return _of_numpy(np.asarray(array))
    raise _native.InvalidError(f"{type(array).__name__} is not an array: expected NumPy, PyTorch, __dlpack__ or "
                               "__array_interface__")


def writable(array, name):
    """view(array) of what is written; a NumPy array that may not be is refused."""
    if isinstance(array, np.ndarray):
        fixed = not array.flags.writeable
    else:
        interface = None if is_torch(array) else getattr(array, "__array_interface__", None)
        fixed = interface is not None and interface["data"] is not None and interface["data"][1]
    if fixed:
        raise _native.InvalidError(f"{name} is read-only: expected an array that may be written")
    return view(array)


def readable(array):
    """view(array); of a contiguous copy where every stride is 0 and no extent is 1, which the C struct cannot say (the
    gradient of out.sum() is such an array)."""
    found = view(array)
    if len(found.shape) == 4 and not any(found.stride) and all([extent > 1 for extent in found.shape]):
        found = view(array.contiguous() if is_torch(array) else np.ascontiguousarray(array))
    return found


def numpy_dtype(code):
    """The NumPy dtype of a code."""
    if code in (_native.BF16, _native.F8E4M3):
        if ml_dtypes is None:
            raise _native.UnsupportedError(f"{_native.DTYPE_NAMES[code]} results in NumPy need the package ml_dtypes")
        return np.dtype(getattr(ml_dtypes, _native.DTYPE_NAMES[code]))
    return np.dtype(_native.DTYPE_NAMES[code])


def empty_like(array, shape, dtype=None):
    """A new array of the same kind and device; dtype is a code of _native or None for the array's own."""
    if is_torch(array):
        torch = sys.modules["torch"]
        return array.new_empty(shape, dtype=None if dtype is None else getattr(torch, _native.DTYPE_NAMES[dtype]))
    found = view(array)
    if found.device != _native.CPU:
        raise _native.UnsupportedError("results on a GPU need PyTorch tensors as inputs")
    return np.empty(shape, dtype=numpy_dtype(found.dtype if dtype is None else dtype))
