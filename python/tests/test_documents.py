"""The recipes of docs/python.md run as they stand there."""

import pathlib
import re

import clients
import flashattn.compat
import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_recipe_runs(block):
    if "transformers" in block and clients.transformers is None:
        pytest.skip("needs transformers")
    try:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "recipe"})
    finally:
        flashattn.compat.uninstall()


def test_the_page_has_its_recipes():
    assert len(BLOCKS) == 11
