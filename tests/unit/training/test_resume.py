"""The file to resume from."""

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.errors import FledgeError
from fledge.training.resume import ResumeState, random_states, restore_random_states


def state(**changes: object) -> ResumeState:
    plain = ResumeState(
        key="k",
        step=3,
        epoch=1,
        row=2,
        tokens=10,
        model={"w": torch.ones(2)},
        optimizer={"state": {"w": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        counters={"skipped": 1},
        sums=[torch.zeros(3)],
        log_bytes=7,
        random=random_states(),
    )
    return replace(plain, **changes)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    assert ResumeState.load(tmp_path, "k") is None
    state().save(tmp_path)
    loaded = ResumeState.load(tmp_path, "k")
    assert loaded is not None
    assert (loaded.step, loaded.epoch, loaded.row, loaded.tokens, loaded.log_bytes) == (3, 1, 2, 10, 7)
    assert torch.equal(loaded.model["w"], torch.ones(2))
    assert loaded.optimizer["param_groups"][0]["betas"] == (0.9, 0.95)


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state().save(tmp_path)

    def killed(_file: int) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(SystemExit):
        state(step=9).save(tmp_path)
    loaded = ResumeState.load(tmp_path, "k")
    assert loaded is not None
    assert loaded.step == 3


def test_another_key_and_damage_are_refused(tmp_path: Path) -> None:
    state().save(tmp_path)
    with pytest.raises(FledgeError, match="belongs to another recipe"):
        ResumeState.load(tmp_path, "other")
    path = tmp_path / "resume.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FledgeError, match=r"cannot be read .* remove it to start training again"):
        ResumeState.load(tmp_path, "k")


def test_all_generators_go_on_where_they_were(tmp_path: Path) -> None:
    np.random.standard_normal(), random.gauss(0, 1)
    state().save(tmp_path)
    drawn = [torch.rand(2).tolist(), np.random.standard_normal(2).tolist(), random.gauss(0, 1), random.random()]
    loaded = ResumeState.load(tmp_path, "k")
    assert loaded is not None
    restore_random_states(loaded.random)
    assert drawn == [torch.rand(2).tolist(), np.random.standard_normal(2).tolist(), random.gauss(0, 1), random.random()]
