import functools
import gc
import os
from pathlib import Path
from typing import IO

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLEDGE_COSTS", "0")  # nothing of what tests measure is to be found in anybody's home
os.environ["COLUMNS"] = "80"  # what commands print is as wide as in a file, whatever terminal the tests are run in,
for _name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):  # and as plain
    os.environ.pop(_name, None)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which torch does not do by itself
# Tests run in parallel processes and their tensors are small: more threads would wait for each other, not work.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)
# An example may take long where others have the core meanwhile, and so may making one.
settings.register_profile("fledge", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fledge")
# Which typer builds anew, with all its options, for each of the hundreds of `fledge` commands that tests run here.
typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects_are_searched_for_garbage() -> None:
    """Modules and tests are a million objects: `gc.collect` in what is tested would walk through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def _blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is beside the pictures of a report. They are made, but not drawn, which takes longest."""

    def savefig(_figure: object, file: IO[str] | Path, **_: object) -> None:
        if isinstance(file, Path):
            file.touch()
        else:
            file.write('<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
