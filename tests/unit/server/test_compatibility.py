"""docs/compatibility.md says what the code does."""

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "compatibility.py"


def test_the_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("compatibility", TOOL)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    is_current = made.PAGE.read_text(encoding="utf-8") == made.page()
    assert is_current, "run python tools/compatibility.py"
