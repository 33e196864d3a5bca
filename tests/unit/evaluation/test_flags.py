"""`fledge inspect --try-flags`: the reading that a drafter was trained with is the one that accepts most."""

import json
from pathlib import Path

import pytest

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.source import bundled_directory
from fledge.checkpoints.tensors import TensorFiles, write_model
from fledge.errors import CheckpointError
from fledge.evaluation import flags
from fledge.models.drafter.variants import EAGLE_1
from fledge.progress import Progress
from fledge.report.intervals import Interval
from tests.checkpoint_fixtures import TARGET, make_drafter


def test_the_flags_of_a_trained_drafter_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled EAGLE-3 drafter, with a config that says otherwise."""
    bundled = bundled_directory("fledgling-eagle3")
    assert bundled is not None
    values = json.loads((bundled / "config.json").read_text())
    files = TensorFiles(bundled)
    tensors = {name: files.read(name) for name in files.infos}
    write_model(tmp_path / "drafter", tensors, {"config.json": {**values, "norm_output": True}})
    monkeypatch.setattr(flags, "_WORKLOAD", "gsm8k")
    monkeypatch.setattr(flags, "_PROMPTS_OF_EACH", 2)
    monkeypatch.setattr(flags, "_MAX_TOKENS", 24)
    readings = flags.try_flags(read_drafter(tmp_path / "drafter"), "fledgling", Progress(quiet=True))
    assert [one.name for one in readings if one.is_stated] == ["norm_output"]
    assert len(readings) == 4  # no fc_norm tensors: nothing to try there
    assert readings[0].name == "none"
    assert all(one.failure is None for one in readings)
    assert len(readings[0].rate_by_depth) == 4


def reading(value: float | None, *, is_stated: bool = False, **on: bool) -> flags.Reading:
    length = None if value is None else Interval(value=value, low=value - 0.1, high=value + 0.1)
    return flags.Reading(flags=dict.fromkeys(flags.TRIED, False) | on, is_stated=is_stated, acceptance_length=length)


def test_advice_is_given_where_the_difference_is_clear() -> None:
    other = reading(2.0, norm_output=True)
    assert flags.advice((other, reading(1.5, is_stated=True))) == (
        "it was probably trained with: norm_output; correct these flags in config.json"
    )
    assert flags.advice((other, reading(1.9, is_stated=True))) is None
    assert flags.advice((reading(2.0, is_stated=True), reading(1.5))) is None
    assert "cannot be run as it is" in str(flags.advice((other, reading(None, is_stated=True))))


def test_eagle1_has_no_flags(tmp_path: Path) -> None:
    save_drafter(make_drafter(EAGLE_1.config_for(TARGET)), tmp_path / "drafter")
    with pytest.raises(CheckpointError, match="EAGLE-1 has no flags"):
        flags.try_flags(read_drafter(tmp_path / "drafter"), "fledgling", Progress(quiet=True))
