"""The file to resume from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.errors import FledgeError
from fledge.files import seal
from fledge.training.recipe import Recipe
from fledge.training.trainer import read_resume_state
from tests.fit_cases import make_inputs, run_fit
from tests.unit.test_files import full_disk


@pytest.fixture(name="recipe")
def _recipe(tmp_path: Path) -> Recipe:
    return make_inputs(tmp_path)


def test_it_says_where_the_run_is(recipe: Recipe) -> None:
    summary, directory = run_fit(recipe), Path(recipe.output) / "fit"
    state: dict[str, Any] = torch.load(directory / "resume.pt", weights_only=True)
    assert (state["step"], state["tokens"]) == (summary["steps"], summary["tokens"])
    assert state["log_bytes"] == (directory / "log.jsonl").stat().st_size
    assert state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_the_old_one_stays_until_the_new_one_is_whole(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = torch.save, 0

    def killed(values: dict[str, Any], path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            path.write_bytes(b"a part")
            raise SystemExit
        save(values, path)

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(SystemExit):
        run_fit(recipe)
    assert torch.load(Path(recipe.output) / "fit" / "resume.pt", weights_only=True)["step"] == recipe.fit.save_every


def test_another_key_and_damage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "resume.pt"
    assert read_resume_state(path, "k") is None
    torch.save({"key": "k", "step": 3}, path)
    seal(path)
    assert read_resume_state(path, "k") == {"key": "k", "step": 3}
    with pytest.raises(FledgeError, match="belongs to another recipe"):
        read_resume_state(path, "other")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FledgeError, match=r"damaged, .* remove it to start training again"):
        read_resume_state(path, "k")


def test_a_flipped_byte_and_a_full_disk_are_one_line(recipe: Recipe) -> None:
    with full_disk(100_000), pytest.raises(FledgeError, match=r"cannot be written"):
        run_fit(recipe)
    run_fit(recipe)
    path = Path(recipe.output) / "fit" / "resume.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # in the middle of a tensor: torch.load does not mind
    path.write_bytes(bytes(content))
    with pytest.raises(FledgeError, match=r"resume\.pt: damaged, .*; remove it to start training again"):
        run_fit(recipe)
