"""One attention call: arrays in, the C struct filled, arrays out. Everything above this file is names and defaults."""

import ctypes
import struct
import sys
import threading

import numpy as np

from . import _native
from ._arrays import View, empty_like, is_torch, numpy_code, readable, view, writable
from ._native import Append, Descale, Exec, Grads, Pages, Partial, Problem, Rotary, Slices, check, lib, pack_tensor
from ._scratch import exec_of, finish

_PROBLEM_BYTES, _GRADS_BYTES = ctypes.sizeof(Problem), ctypes.sizeof(Grads)
_AT = {name: getattr(Problem, name).offset for name, _ in Problem._fields_}


def _dims(found, name, dims):
    """A view's shape and strides as four dimensions. dims says which of the four the array's own are."""
    if len(found.shape) != len(dims):
        raise _native.InvalidError(f"{name} has {len(found.shape)} dimensions {tuple(found.shape)}: expected {len(dims)}")
    shape, stride = [1, 1, 1, 1], [1, 1, 1, 1]
    for own, place in enumerate(dims):
        shape[place], stride[place] = found.shape[own], found.stride[own]
    return shape, stride


_ALL = (0, 1, 2, 3)  # [batch, rows, heads, d]
_PACKED = (1, 2, 3)  # varlen: [total, heads, d]


def _put(buffer, offset, found, name, dims=_ALL, beside=None):
    """Write the C tensor of a View. beside: a View on whose device this one must be."""
    if beside is not None and (found.device != beside.device or found.index != beside.index):
        raise _native.InvalidError(f"{name} is on {_device_name(found)} but expected on {_device_name(beside)}")
    if len(found.shape) == 4 and dims is _ALL:  # the hot path
        shape, stride = found.shape, found.stride
    else:
        shape, stride = _dims(found, name, dims)
    if not any(stride):  # the C struct reads four zeros as "contiguous"; where the extent is 1 a stride means nothing
        stride = [0 if extent > 1 else 1 for extent in shape]
        if not any(stride):
            raise _native.InvalidError(f"{name} is broadcast in every dimension: make it contiguous")
    if found.dtype < 0:
        raise _native.InvalidError(f"{name} is boolean or integer: expected float32, float16 or bfloat16")
    pack_tensor(buffer, offset, found.data, found.dtype, *shape, *stride)


def _device_name(found):
    return "the CPU" if found.device == _native.CPU else f"CUDA device {found.index}"


_HOST = View(None, -2, (), ())  # stands for q where an array must be in host memory


def int32_array(array, name, beside, keep, shape, rows_apart=False):
    """The View of an int32 array of this shape (None: any extent) on the device of the View beside; of a contiguous copy if it is
    not one already. C is told addresses only, and would read past the end of what is too short. rows_apart: of two dimensions
    the first may have any stride that leaves a row whole."""
    found = view(array)
    if len(found.shape) != len(shape) or any([want not in (None, extent) for want, extent in zip(shape, found.shape)]):
        expected = ", ".join(["any" if want is None else str(want) for want in shape])
        raise _native.InvalidError(f"{name} has shape {list(found.shape)}: expected [{expected}]")
    if found.dtype >= -1:
        raise _native.InvalidError(f"{name} is {_native.DTYPE_NAMES[found.dtype] if found.dtype >= 0 else 'bool'}: expected int32")
    if found.dtype != -2 or not (_is_contiguous(found.shape, found.stride) or rows_apart and found.stride[0] >= found.shape[1]
                                 and _is_contiguous(found.shape[1:], found.stride[1:])):
        if not (is_torch(array) or hasattr(array, "__array_interface__")):
            array = np.from_dlpack(array)
        given = array
        if is_torch(array):
            array = array.to(dtype=sys.modules["torch"].int32).contiguous()
        else:
            array = np.ascontiguousarray(array, dtype=np.int32)
        if found.dtype != -2 and found.device == _native.CPU and (array != given).any():
            raise _native.InvalidError(f"{name} has numbers that int32 does not hold")
        found = view(array)
    if found.device != beside.device or found.index != beside.index:
        raise _native.InvalidError(f"{name} is on {_device_name(found)} but expected on {_device_name(beside)}")
    keep.append(array)
    return found


def _is_contiguous(shape, stride):
    step = 1
    for extent, own in zip(reversed(shape), reversed(stride)):
        if extent > 1 and own != step:
            return False
        step *= extent
    return True


def _pages(block_table, batch, beside, keep):
    """The C struct of block_table [batch, pages]. It may be a part of a wider one: nothing is copied then."""
    found = int32_array(block_table, "block_table", beside, keep, (batch, None), rows_apart=True)
    return Pages(found.data, found.stride[0] if batch > 1 else 0, found.shape[1], 0)


def sides(window):
    """(left, right) of a window_size."""
    try:
        left, right = window
        left < 0, right < 0  # of what is no number that is an error too
    except (TypeError, ValueError):
        raise _native.InvalidError(f"window is {window!r}: expected two numbers, (left, right)") from None
    return left, right


def _wrong_number(window, **others):
    named = "".join([f", {name} {value!r}" for name, value in others.items()])
    return _native.InvalidError(f"window is {tuple(window)}{named}: expected numbers; window, num_splits and max_seqlen are whole "
                                "and below 2**31")


def _stream(index):
    """CUDA: PyTorch's current stream on the device, where it can be had without the object of torch.cuda.current_stream, which takes two microseconds."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # Triton asks it too
    return raw(index) if raw else torch.cuda.current_stream(index).cuda_stream


class Call:
    """A filled flash_attn_problem. Fields that are not given keep the C default, zero."""

    context = None  # what flash_attn_create gave; None: the package's

    def __init__(self, q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, bias=None, alibi_slopes=None,
                 sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, leftpad_k=None,
                 cache_batch_idx=None, max_seqlen_q=0, max_seqlen_k=0, block_table=None, slices=None,
                 slice_offsets=None, dropout_p=0.0, seed=0, offset=0, num_splits=0, q_descale=None, k_descale=None,
                 v_descale=None, deterministic=False, reference=False):
        self.q, self.k, self.v = q, k, v
        self.buffer = buffer = ctypes.create_string_buffer(_PROBLEM_BYTES)
        found_q, found_k, found_v = readable(q), readable(k), readable(v)
        self.keep = keep = [found_q, found_k, found_v]
        device = found_q.device
        self.found_q = found_q
        self.dims_q = _PACKED if cu_seqlens_q is not None else _ALL
        dims_k = _PACKED if cu_seqlens_k is not None else _ALL
        _put(buffer, _AT["q"], found_q, "q", self.dims_q)
        _put(buffer, _AT["k"], found_k, "k", dims_k, found_q)
        _put(buffer, _AT["v"], found_v, "v", dims_k, found_q)
        self.head_dim_v = found_v.shape[-1]

        self.problem = problem = Problem.from_buffer(buffer)
        self.address = ctypes.addressof(buffer)
        problem.device.type = _native.REFERENCE if reference and device == _native.CPU else device
        problem.device.index = found_q.index
        if scale is not None:
            problem.scale = scale if scale != 0 else -0.0
        if softcap:
            problem.softcap = softcap
        left, right = sides(window)
        try:
            struct.pack("5i", left, right, num_splits, max_seqlen_q or 0, max_seqlen_k or 0)  # ctypes would cut off what is too large
        except struct.error:
            raise _wrong_number(window, num_splits=num_splits, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k) from None
        if causal:
            right = 0
        if left >= 0 or (right >= 0 and not (causal and left < 0)):
            problem.mask, problem.window_left, problem.window_right = _native.MASK_WINDOW, max(left, -1), max(right, -1)
        elif causal:
            problem.mask = _native.MASK_CAUSAL
        if bias is not None:
            found = readable(bias)
            keep.append(found)
            _put(buffer, _AT["bias"], found, "bias", _ALL, found_q)
        if alibi_slopes is not None:
            found = view(alibi_slopes)
            keep.append(alibi_slopes)
            _put(buffer, _AT["alibi_slopes"], found, "alibi_slopes", (1,) if len(found.shape) == 1 else (0, 1), found_q)
        if sinks is not None:
            keep.append(sinks)
            _put(buffer, _AT["sinks"], view(sinks), "sinks", (1,), found_q)
        batch = found_q.shape[0]
        if cu_seqlens_q is not None:
            batch = int32_array(cu_seqlens_q, "cu_seqlens_q", found_q, keep, (None,)).shape[0] - 1
            if batch < 0:
                raise _native.InvalidError("cu_seqlens_q is empty: expected 0 and the end of each sequence")
        for name, array, count in (("cu_seqlens_q", cu_seqlens_q, batch + 1), ("cu_seqlens_k", cu_seqlens_k, batch + 1),
                                   ("seqused_q", seqused_q, batch), ("seqused_k", seqused_k, batch),
                                   ("leftpad_k", leftpad_k, batch), ("cache_batch_idx", cache_batch_idx, batch)):
            if array is not None:
                setattr(problem, name, int32_array(array, name, found_q, keep, (count,)).data)
        if cu_seqlens_q is not None:
            problem.batch = batch
            problem.max_seqlen_q = max_seqlen_q or 0
        if cu_seqlens_k is not None:
            problem.max_seqlen_k = max_seqlen_k or 0
        problem.num_splits = num_splits
        if block_table is not None:
            problem.pages = _pages(block_table, batch, found_q, keep)
        if slices is not None:
            # Slices are host memory for every device.
            table = slices.cpu() if is_torch(slices) else slices
            offsets = slice_offsets.cpu() if is_torch(slice_offsets) else slice_offsets
            found = int32_array(table, "slices", _HOST, keep, (None, 5))
            problem.slices = Slices(found.data, found.shape[0], 0, None)
            if offsets is not None:
                problem.slices.offsets = int32_array(offsets, "slice_offsets", _HOST, keep, (batch + 1,)).data
        if dropout_p:
            problem.dropout.p, problem.dropout.seed, problem.dropout.offset = dropout_p, seed, offset
        for name, array in (("q", q_descale), ("k", k_descale), ("v", v_descale)):
            if array is not None:
                keep.append(array)
                _put(buffer, _AT["descale"] + getattr(Descale, name).offset, view(array), f"{name}_descale", (0, 1),
                     found_q)
        problem.deterministic = deterministic
        self.exec = None if device != _native.CUDA else exec_of(_stream(found_q.index), found_q.index) if is_torch(q) else Exec(stream=_stream(found_q.index))

    def _exec(self):
        return ctypes.addressof(self.exec) if self.exec is not None else None

    def _set_results(self, o, lse):
        self.keep += [o, lse]
        _put(self.buffer, _AT["o"], writable(o, "out"), "out", self.dims_q, self.found_q)
        if lse is not None:
            _put(self.buffer, _AT["lse"], writable(lse, "softmax_lse"), "softmax_lse", (1, 2) if self.dims_q is _PACKED else (0, 1, 2),
                 self.found_q)

    def forward(self, out=None, want_lse=True):
        """Run the forward. Returns (o, lse or None); lse is [batch, heads, seqlen_q], varlen [heads, total_q]."""
        shape = self.found_q.shape
        if out is None:
            dtype = _native.BF16 if self.found_q.dtype == _native.F8E4M3 else None
            out = empty_like(self.q, (*shape[:-1], self.head_dim_v), dtype)
        lse = None
        if want_lse:
            rows = (shape[1], shape[0]) if self.dims_q is _PACKED else (shape[0], shape[2], shape[1])
            lse = empty_like(self.q, rows, _native.F32)
        self._set_results(out, lse)
        self.run_forward()
        return out, lse

    def run_forward(self):
        """Once more what forward did, on the same tensors."""
        finish(lib.flash_attn_forward(self.context or _native.context, self.address, self._exec()))

    def check_forward(self, out=None):
        """Raise what forward(out) would, as far as it can be known without the tensors: computes and writes nothing. Lengths in
        host memory are looked at too."""
        if out is not None:
            self._set_results(out, None)
        context = self.context or _native.context
        if self.found_q.device == _native.CUDA and out is None:
            check(lib.flash_attn_workspace_size(context, self.address, _native.FORWARD, ctypes.byref(ctypes.c_size_t())))
        else:
            check(lib.flash_attn_explain(context, self.address, _native.FORWARD, ctypes.byref(_native.Explanation())))

    def backward_addresses(self, dout, o, lse, dq=None, dk=None, dv=None, dbias=None, dsinks=None):
        """Fill the structs of a backward. Returns the C function's problem and grads."""
        self._set_results(o, lse)
        buffer = ctypes.create_string_buffer(_GRADS_BYTES)
        self.keep.append(buffer)
        dims_k = _PACKED if self.problem.cu_seqlens_k else _ALL
        found = readable(dout)
        self.keep.append(found)
        _put(buffer, Grads.dout.offset, found, "dout", self.dims_q, self.found_q)
        for name, array, dims in (("dq", dq, self.dims_q), ("dk", dk, dims_k),
                                  ("dv", dv, dims_k), ("dbias", dbias, _ALL), ("dsinks", dsinks, (1,))):
            if array is not None:
                _put(buffer, getattr(Grads, name).offset, writable(array, name), name, dims, self.found_q)
        return self.address, ctypes.addressof(buffer)

    def backward(self, *arguments):
        """Run the backward; gradients are written to those of dq, dk, dv, dbias, dsinks that are given."""
        finish(lib.flash_attn_backward(self.context or _native.context, *self.backward_addresses(*arguments), self._exec()))


# ---- the short way: q, k and v of one dtype on one device, and no array options but cumulative lengths ----

# Device; q, k, v; o and lse by address and dtype alone (shape 0: implied); scale, softcap, mask, window.
_HEAD = "<ii" + 3 * "Qi4x4q4q" + 2 * "Qi4x64x" + "ffiii"
_pack_head = struct.Struct(_HEAD).pack_into
assert struct.calcsize(_HEAD) == _AT["window_right"] + 4
# cu_seqlens_q, cu_seqlens_k; batch, max_seqlen_q, max_seqlen_k.
_pack_lengths = struct.Struct("<QQ32xiii").pack_into
assert _AT["cu_seqlens_q"] + 48 == _AT["batch"]
_pack_grads = struct.Struct("<" + 4 * "Qi4x4q4q").pack_into  # dout, dq, dk, dv
assert struct.calcsize("<" + 4 * "Qi4x4q4q") == Grads.dbias.offset
_CONTIGUOUS = (0, 0, 0, 0)


class _Short(threading.local):
    """A thread's own structs. Only the packed fields are ever written, so the rest stays zero."""

    def __init__(self):
        self.plain, self.varlen = (ctypes.create_string_buffer(_PROBLEM_BYTES) for _ in range(2))
        self.plain_at, self.varlen_at = ctypes.addressof(self.plain), ctypes.addressof(self.varlen)
        self.grads = ctypes.create_string_buffer(_GRADS_BYTES)
        self.grads_at = ctypes.addressof(self.grads)
        self.exec = exec_of(None, 0)


_short = _Short()


def _short_fill(device, index, dtype, q, q_shape, q_stride, k, k_shape, k_stride, v, v_shape, v_stride, out, lse, scale,
                causal, window, softcap, lengths=None):
    """Fill this thread's struct in one go; q, k, v, out, lse are addresses. Returns the struct's own."""
    left, right = sides(window)
    if left < 0 and right < 0:
        mask, left, right = _native.MASK_CAUSAL if causal else _native.MASK_NONE, 0, 0
    elif causal and left < 0:
        mask, left, right = _native.MASK_CAUSAL, 0, 0
    else:
        mask, left, right = _native.MASK_WINDOW, max(left, -1), 0 if causal else max(right, -1)
    short = _short
    try:
        _pack_head(short.plain if lengths is None else short.varlen, 0, device, index, q, dtype, *q_shape, *q_stride, k, dtype,
                   *k_shape, *k_stride, v, dtype, *v_shape, *v_stride, out, dtype, lse, 0,
                   -0.0 if scale == 0 else scale or 0.0, softcap, mask, left, right)
        if lengths is None:
            return short.plain_at
        _pack_lengths(short.varlen, _AT["cu_seqlens_q"], *lengths)
    except struct.error:
        raise _wrong_number(window, scale=scale, softcap=softcap, max_seqlens=lengths and lengths[3:]) from None
    return short.varlen_at


def _short_tensors(q, k, v, dtype, out, lse, scale, causal, window, softcap, cu_seqlens, max_seqlens, heads_first=False):
    """_short_fill of torch tensors: (the struct's address, the address of exec); None where a stride cannot be said to C."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
    if not (any(q_stride) and any(k_stride) and any(v_stride)):
        return None
    lengths = None
    if heads_first:
        q_shape, k_shape, v_shape, q_stride, k_stride, v_stride = [
            (t[0], t[2], t[1], t[3]) for t in (q_shape, k_shape, v_shape, q_stride, k_stride, v_stride)]
    elif cu_seqlens:
        q_shape, k_shape, v_shape = (1, *q_shape), (1, *k_shape), (1, *v_shape)
        q_stride, k_stride, v_stride = (1, *q_stride), (1, *k_stride), (1, *v_stride)
        cu_q, cu_k = cu_seqlens
        lengths = cu_q.data_ptr(), cu_k.data_ptr(), cu_q.shape[0] - 1, *max_seqlens
    device, index, run = _native.CPU, 0, None
    if not q.is_cpu:
        device, index = _native.CUDA, q.device.index
        _short.exec.allocator = index
        _short.exec.stream = _stream(index)
        run = ctypes.addressof(_short.exec)
    return _short_fill(device, index, dtype, q.data_ptr(), q_shape, q_stride, k.data_ptr(), k_shape, k_stride,
                       v.data_ptr(), v_shape, v_stride, out.data_ptr(), 0 if lse is None else lse.data_ptr(), scale,
                       causal, window, softcap, lengths), run


def short_torch(q, k, v, dtype, scale, causal, window, softcap, want_lse, cu_seqlens=(), max_seqlens=(0, 0),
                heads_first=False):
    """Call(q, k, v, ...).forward() without objects in between: a few microseconds, which is what a tiny attention takes.
    dtype is q's code, which k and v share; cu_seqlens () or (of q, of k), contiguous int32 on q's device. heads_first: q, k, v
    and the result are [batch, heads, rows, d], the result in memory as ever. None where a stride cannot be said to C."""
    shape = q.shape
    if heads_first:
        batch, heads, rows, _ = shape
        head_dim = v.shape[3]
        out = q.new_empty_strided((batch, heads, rows, head_dim), (rows * heads * head_dim, head_dim, heads * head_dim, 1))
    elif q.is_contiguous() and shape[-1] == v.shape[-1]:
        out = sys.modules["torch"].empty_like(q)  # the quickest way to new memory
    else:
        out = q.new_empty((*shape[:-1], v.shape[-1]))
    lse = None
    if want_lse:
        lse = q.new_empty((shape[1], shape[0]) if cu_seqlens else (shape[0], shape[2], shape[1]),
                          dtype=sys.modules["torch"].float32)
    filled = _short_tensors(q, k, v, dtype, out, lse, scale, causal, window, softcap, cu_seqlens, max_seqlens, heads_first)
    if filled is None:
        return None
    finish(lib.flash_attn_forward(_native.context, *filled))
    return out, lse


def short_torch_backward(dout, q, k, v, out, lse, dtype, scale, causal, window, softcap, cu_seqlens, max_seqlens,
                         grads=None):
    """The gradients (dq, dk, dv) of what short_torch gave, new or written to grads. None where dout's strides cannot be
    said to C."""
    if not any(dout.stride()) or dout.dtype != q.dtype or not out.is_contiguous() or not lse.is_contiguous():
        return None
    at, run = _short_tensors(q, k, v, dtype, out, lse, scale, causal, window, softcap, cu_seqlens, max_seqlens)
    if grads is None:
        empty_like = sys.modules["torch"].empty_like
        grads = empty_like(q), empty_like(k), empty_like(v)
    fields, lead = [], (1,) if cu_seqlens else ()
    for t in (dout, *grads):
        fields += (t.data_ptr(), dtype, *lead, *t.shape, *lead, *t.stride())
    _pack_grads(_short.grads, 0, *fields)
    finish(lib.flash_attn_backward(_native.context, at, _short.grads_at, run))
    return grads


def short_numpy(q, k, v, scale, causal, window, softcap, want_lse):
    """The same for NumPy; None where the arrays are not contiguous [b, s, h, d] of one dtype."""
    if not (type(q) is type(k) is type(v) is np.ndarray and q.dtype == k.dtype == v.dtype
            and q.ndim == k.ndim == v.ndim == 4 and q.flags.c_contiguous and k.flags.c_contiguous
            and v.flags.c_contiguous):
        return None
    dtype = numpy_code(q.dtype)
    if dtype not in (_native.F32, _native.F16, _native.BF16):
        return None
    (batch, rows, heads, _), v_shape = q.shape, v.shape
    out = np.empty((batch, rows, heads, v_shape[3]), q.dtype)
    lse = np.empty((batch, heads, rows), np.float32) if want_lse else None
    at = _short_fill(_native.CPU, 0, dtype, q.__array_interface__["data"][0], q.shape, _CONTIGUOUS,
                     k.__array_interface__["data"][0], k.shape, _CONTIGUOUS, v.__array_interface__["data"][0], v_shape,
                     _CONTIGUOUS, out.__array_interface__["data"][0],
                     lse.__array_interface__["data"][0] if want_lse else 0, scale, causal, window, softcap)
    status = lib.flash_attn_forward(_native.context, at, None)
    if status:
        check(status)
    return out, lse


def append_kv(k_cache, v_cache, k_new=None, v_new=None, *, q=None, q_out=None, cache_seqlens=None, cache_batch_idx=None,
              leftpad_k=None, block_table=None, rotary_cos=None, rotary_sin=None, interleaved=True, q_at_end=False):
    """flash_attn_append_kv: write k_new, v_new after the keys that the cache holds; rotate them, and q into q_out."""
    keep = [k_cache, v_cache, k_new, v_new, q, q_out]
    buffer = ctypes.create_string_buffer(ctypes.sizeof(Append))
    found = view(k_cache)
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache), ("k_new", k_new), ("v_new", v_new), ("q", q),
                        ("q_out", q_out)):
        if array is not None:
            written = name in ("k_cache", "v_cache") and k_new is not None or name == "q_out"
            _put(buffer, getattr(Append, name).offset, writable(array, name) if written else view(array), name, _ALL, found)
    append = Append.from_buffer(buffer)
    append.device.type, append.device.index = found.device, found.index
    batch = (q if k_new is None else k_new).shape[0]
    for name, array in (("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx),
                        ("leftpad_k", leftpad_k)):
        if array is not None:
            setattr(append, name, int32_array(array, name, found, keep, (batch,)).data)
    if block_table is not None:
        append.pages = _pages(block_table, batch, found, keep)
    if (rotary_cos is None) != (rotary_sin is None):
        raise _native.InvalidError("rotary_cos and rotary_sin must be given together")
    if rotary_cos is not None:
        start = Append.rotary.offset
        _put(buffer, start + Rotary.cos.offset, view(rotary_cos), "rotary_cos", (0, 1), found)
        _put(buffer, start + Rotary.sin.offset, view(rotary_sin), "rotary_sin", (0, 1), found)
        append.rotary.interleaved = interleaved
    append.q_at_end = q_at_end
    run = Exec(stream=_stream(found.index)) if found.device == _native.CUDA else None
    check(lib.flash_attn_append_kv(_native.context, ctypes.addressof(buffer), ctypes.addressof(run) if run else None))


def merge(parts, out=None, lse=None):
    """flash_attn_merge: [(o, lse), ...] over disjoint keys into one (o, lse). o [b, s, h, d], lse [b, h, s]."""
    if len(parts) == 0:
        raise _native.InvalidError("parts is empty: expected one pair of o and lse or more")
    size = ctypes.sizeof(Partial)
    first, first_lse = parts[0]
    if out is None:
        out = empty_like(first, tuple(first.shape))
    if lse is None:
        lse = empty_like(first_lse, tuple(first_lse.shape))
    buffer = ctypes.create_string_buffer(size * (len(parts) + 1))
    found = view(first)
    views = [(view(part), view(part_lse)) for part, part_lse in parts] + [(writable(out, "out"), writable(lse, "softmax_lse"))]
    for n, (part, part_lse) in enumerate(views):
        _put(buffer, n * size + Partial.o.offset, part, "o", _ALL, found)
        _put(buffer, n * size + Partial.lse.offset, part_lse, "lse", (0, 1, 2), found)
    run = Exec(stream=_stream(found.index)) if found.device == _native.CUDA else None
    start = ctypes.addressof(buffer)
    check(lib.flash_attn_merge(_native.context, _native.Device(found.device, found.index), start, len(parts),
                               start + len(parts) * size, ctypes.addressof(run) if run else None))
    return out, lse
