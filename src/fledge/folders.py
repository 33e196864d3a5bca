"""Where Fledge keeps what it can make again."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """FLEDGE_CACHE, or `fledge` in XDG_CACHE_HOME, or ~/.cache/fledge."""
    if given := os.environ.get("FLEDGE_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fledge"
