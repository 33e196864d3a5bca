"""The models that come with the package, by name: a small chat model and two drafters for it."""

from importlib.resources import files
from pathlib import Path

TARGET = "fledgling"
DRAFTERS = {"EAGLE-3": "fledgling-eagle3", "EAGLE-3.1": "fledgling-eagle3.1"}  # by variant
NAMES = (TARGET, *DRAFTERS.values())


def bundled_directory(name: str) -> Path | None:
    """Return the directory of a bundled model, or None if `name` is not the name of one."""
    return Path(str(files("fledge"))) / "bundled" / name if name in NAMES else None
