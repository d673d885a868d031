"""What the benches on one GPU share: the library and PyTorch, the card and its clock, calls by turns and in CUDA graphs, reports."""

import ctypes
import functools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
if (ROOT / "build" / "libflashattn.so").exists():  # else the installed package
    os.environ.setdefault("FLASHATTN_LIBRARY", str(ROOT / "build" / "libflashattn.so"))
    sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

import flashattn.torch_ops  # noqa: E402, F401 - so that kernels are compiled as for any user of PyTorch
from flashattn import _call, _native  # noqa: E402

DEVICE = "cuda"
PEERS = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
         "cudnn": SDPBackend.CUDNN_ATTENTION}


def present():
    return torch.cuda.is_available()


def state():
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        return subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return torch.cuda.get_device_name()


def new_context(kernel=None):
    """The address of a context, with this kernel or the best ones."""
    made = ctypes.c_void_p()
    _call.check(_call.lib.flash_attn_create(ctypes.byref(made), ctypes.byref(_native.Options(kernel=kernel and kernel.encode()))))
    return made.value


kernel_context = functools.cache(new_context)


def milliseconds(run, launches):
    """Of the card: launches gather behind a kernel that spins for a millisecond, or the host's way to the first would be timed too."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)
    begin.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / launches


def time_by_turns(runs, groups):
    """Median milliseconds of each run; about 20 ms of launches a group."""
    launches = {name: max(1, min(50, int(20 / max(milliseconds(run, 2), 1e-3)))) for name, run in runs.items()}
    times, order = {name: [] for name in runs}, random.Random(0)
    for _ in range(groups):
        for name in order.sample(list(runs), len(runs)):  # or who comes behind a slow one has a cooler card, with higher clocks
            times[name].append(milliseconds(runs[name], launches[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def forwards(calls, context=None):
    """What makes these calls, in one workspace: without it a graph would hold allocations."""
    context, size = context or _native.context, ctypes.c_size_t()
    _call.check(_call.lib.flash_attn_workspace_size(context, calls[0].address, _native.FORWARD, ctypes.byref(size)))
    space = torch.empty(max(1, size.value), device=DEVICE, dtype=torch.uint8)

    def run():
        for call in calls:
            if DEVICE == "cuda":
                call.exec.stream = torch.cuda.current_stream().cuda_stream
                call.exec.workspace, call.exec.workspace_bytes = space.data_ptr(), size.value
            call.run_forward()

    return run


def graph_of(run, error):
    """What replays the calls of `run`, or "WRONG ..."."""
    if error is not None:
        return f"WRONG {error:.1e}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.kept = run, kept
    return graph


def time_graphs(graph, names, groups, quiet):
    """(row, {name: milliseconds}): graph(name) is what graph_of gives. row: "WRONG ...", or None where there is no kernel or no memory, which is said of who is not quiet."""
    row, graphs = {}, {}
    for name in names:
        try:
            graphs[name] = graph(name)
        except Exception as problem:
            row[name] = None
            if name not in quiet:
                print(f"  {name}: {first_line(problem)}")
    row.update({name: found for name, found in graphs.items() if isinstance(found, str)})
    return row, time_by_turns({name: found.replay for name, found in graphs.items() if not isinstance(found, str)}, groups)


def first_line(problem):
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__


def write_report(file, schema, before, rows, **more):
    """Nothing without a file. before: the card's state."""
    if file:
        report = {"schema": schema, "card": before, "torch": torch.__version__, **more, "rows": rows}
        pathlib.Path(file).write_text(json.dumps(report, indent=1))


def end(rows, ratios, peer="the best peer", speeds="tflops"):
    """What a bench ends with: the card's state, what ours has over the peer, and how many answers were wrong. Its exit status."""
    print(f"after: {state()}")
    wrong = sum(isinstance(x, str) for row in rows for x in row.get(speeds, {}).values())
    over = f"ours over {peer}: geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}, {len(ratios)} cells; " if ratios else ""
    print(f"{over}{wrong} wrong answers")
    return 1 if wrong else 0
