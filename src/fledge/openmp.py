"""OpenMP's threads, torch's and those of the C layers, sleep soon when they wait. Imports only what is fast to import.

By default they spin for milliseconds. If other processes keep the cores busy, the system may put two of them on one
core, where one spins while the other should run: a call took 34 times as long as with one thread.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

SPIN_COUNT = "4000"  # some 50 microseconds: about what lies between two calls
_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def load_openmp() -> None:
    """Load torch's libgomp before torch does, as it reads `GOMP_SPINCOUNT` then and only then.

    Does nothing if torch is imported already, has no libgomp of its own, or if the environment says how to wait. The
    environment is left as it was: other programs that this one starts wait as they like.
    """
    if "torch" in sys.modules or any(name in os.environ for name in _VARIABLES):
        return
    found = importlib.util.find_spec("torch")
    folders = [] if found is None else [Path(one) / "lib" for one in found.submodule_search_locations or ()]
    libraries = [library for folder in folders for library in sorted(folder.glob("libgomp*.so*"))]
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        for library in libraries[:1]:
            ctypes.CDLL(str(library))
    except OSError:
        pass  # torch will say what is wrong with it
    finally:
        del os.environ["GOMP_SPINCOUNT"]
