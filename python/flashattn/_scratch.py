"""Scratch memory of calls on PyTorch's CUDA tensors: from PyTorch's allocator. It gives what it caches, where the device itself has
nothing left; counts it; keeps it over synchronisations; and takes it from the graph's pool while a CUDA graph is captured."""

import sys
import threading

from ._native import Allocate, Exec, check


class _Held(threading.local):
    address = error = None


_held = _Held()


def _allocate(device, count):
    """flash_attn_exec.allocate; allocator is the device's number. It runs in the thread of the call, on its stream."""
    try:
        _held.address = sys.modules["torch"].cuda.caching_allocator_alloc(count, device or 0)
    except BaseException as error:  # C cannot raise it; finish does
        _held.error = error
        return None
    return _held.address


_callback = Allocate(_allocate)


def exec_of(stream, device):
    """How to run on a stream of PyTorch's: each call is to be followed by finish."""
    return Exec(stream=stream, allocate=_callback, allocator=device)


def finish(status):
    """Behind a call: give back its scratch memory to PyTorch, whose next tensor there is written behind the call, on its stream,
    and raise what a status other than OK means."""
    if _held.address is not None:
        address, _held.address = _held.address, None
        sys.modules["torch"].cuda.caching_allocator_delete(address)
    if status:
        error, _held.error = _held.error, None
        if error is not None:
            raise error
        check(status)
