import os
import pathlib
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # attention_math.py, also in processes that tests start

_figures = []


@pytest.fixture
def figure():
    """figure(label, theirs, ours, turns): time both by turns and say at the end of the run what it came to. Nothing fails by it:
    the machine may be busy. python/bench.py measures with more care. Where CI is set, nobody looks and nothing is timed."""

    def measure(label, theirs, ours, turns=3):
        if os.environ.get("CI"):
            return
        best = [float("inf")] * 2
        for _ in range(turns):
            for n, run in enumerate((theirs, ours)):
                begin = time.perf_counter()
                run()
                best[n] = min(best[n], time.perf_counter() - begin)
        _figures.append(f"{label}: PyTorch {best[0] * 1e3:.1f} ms, flashattn {best[1] * 1e3:.1f} ms, {best[0] / best[1]:.2f} times")

    return measure


def pytest_terminal_summary(terminalreporter):
    if _figures:
        terminalreporter.section("against PyTorch's attention, in passing")
        for line in _figures:
            terminalreporter.write_line(line)
