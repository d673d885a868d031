"""What the tests of bench/ share: its programs as modules, and running one."""

import importlib.util
import pathlib
import sys

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(BENCH))  # as for a script
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def run(program, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [program.__file__, *map(str, words)])
    return program.main()
