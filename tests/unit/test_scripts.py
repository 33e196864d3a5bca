"""Scripts that no other test runs, or that only a GPU runs: what they take from the package is there."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path for folder in ("benchmarks", "tests/gpu", "tests/vllm_parity") for path in (ROOT / folder).glob("*.py")
)


def _imported(path: Path) -> Iterator[tuple[str, str]]:
    """Each module of ours and each name that is taken from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fledge":
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_takes_from_the_package_is_there(script: Path) -> None:
    missing = []
    for module, name in _imported(script):
        try:
            found = hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            found = error.name is not None and not error.name.startswith("fledge")  # another environment's
        if not found:
            missing.append(f"{module}.{name}")
    assert not missing
