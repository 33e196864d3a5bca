"""What a vLLM that serves loads, by path and without the rest of Fledge: `fledge_drafter.py`, and nothing beside it."""

import os
from pathlib import Path


def environment(token: str) -> dict[str, str]:
    """Variables for a vLLM that shall find it, and know who may ask."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "FLEDGE_DRAFTER_TOKEN": token}
