"""Directories for what tests of one process share and make once."""

import atexit
import tempfile
from pathlib import Path


def shared_directory(name: str) -> Path:
    """Return a new directory, removed when this process ends. Copies of the process may use it and leave it there."""
    directory = tempfile.TemporaryDirectory(prefix=f"fledge-{name}-")
    atexit.register(directory.cleanup)
    return Path(directory.name)
