"""Every trap gives a line that names file, field and what to do; sound checkpoints give none."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import convert_drafter, load_drafter, save_drafter
from fledge.checkpoints.finding import NAMES
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.target import save_target
from fledge.errors import CheckpointError, CheckpointWarning
from tests.broken_checkpoints import EAGLE31, ERRORS, TRAPS, UNREADABLE, WARNINGS, Trap
from tests.checkpoint_fixtures import LAYER, TARGET, make_drafter
from tests.tiny_models import make_target


def named(traps: tuple[Trap, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trap", traps, ids=lambda trap: trap.name)


def test_names_are_distinct() -> None:
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)


@named(UNREADABLE)
def test_unreadable_directories_are_refused_in_one_line(trap: Trap, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    with pytest.raises(CheckpointError) as caught:
        read_drafter(tmp_path / "drafter")
    message = str(caught.value)
    assert trap.says in message
    assert str(tmp_path) in message
    assert "\n" not in message


@named(ERRORS)
def test_errors_stop_loading(trap: Trap, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    findings = [f for f in check(read_drafter(tmp_path / "drafter"), TARGET) if f.severity == "error"]
    (finding,) = [f for f in findings if f.name == trap.finding][:1]
    assert trap.says in finding.message()
    assert "\n" not in finding.message()
    assert finding.fixed_by_convert == trap.fixed_by_convert
    with pytest.raises(CheckpointError) as caught:
        load_drafter(tmp_path / "drafter", TARGET)
    assert str(caught.value).startswith(str(tmp_path / "drafter"))
    assert ("more; run `fledge inspect`" in str(caught.value)) == (len(findings) > 1)


@named(WARNINGS)
def test_warnings_do_not_stop_loading(trap: Trap, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    (finding,) = check(read_drafter(tmp_path / "drafter"), TARGET)
    assert finding.name == trap.finding
    assert trap.says in finding.message()
    assert finding.fixed_by_convert == trap.fixed_by_convert
    with pytest.warns(CheckpointWarning, match=rf"\[{trap.finding}\]"):
        load_drafter(tmp_path / "drafter", TARGET)


@named(tuple(trap for trap in ERRORS if not trap.fixed_by_convert))
def test_convert_refuses_what_it_cannot_repair(trap: Trap, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    save_target(make_target(TARGET), tmp_path / "target")
    with pytest.raises(CheckpointError):
        convert_drafter(tmp_path / "drafter", tmp_path / "out", to="vllm", target=tmp_path / "target")
    assert not (tmp_path / "out").exists()


@named(tuple(trap for trap in ERRORS + WARNINGS if trap.fixed_by_convert))
def test_convert_repairs_what_is_evident(trap: Trap, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    fixed, _ = convert_drafter(tmp_path / "drafter", tmp_path / "out", to="vllm")
    assert trap.finding in {finding.name for finding in fixed}
    loaded = load_drafter(tmp_path / "out", TARGET)
    assert loaded.config == trap.config


def test_convert_writes_zeros_for_an_output_bias_that_vllm_would_invent(tmp_path: Path) -> None:
    drafter = make_drafter(replace(EAGLE31, layer=replace(LAYER, qkv_bias=True)))
    save_drafter(drafter, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter", TARGET)
    assert torch.equal(loaded.state_dict()["layers.0.self_attn.o_proj.bias"], torch.zeros(32))


def test_every_finding_is_documented_and_has_a_trap() -> None:
    root = Path(__file__).parents[3]
    documented = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", (root / "docs" / "checkpoints.md").read_text()))
    source = "".join(path.read_text() for path in (root / "src" / "fledge" / "checkpoints").rglob("*.py"))
    trapped = {trap.finding for trap in TRAPS if trap.finding is not None}
    trapped |= {"target-differs", "tokenizer-differs"}  # two targets are needed for these: test_wrong_target.py
    assert trapped == documented == set(NAMES)
    assert {name for name in NAMES if f'"{name}"' not in source} == set(), "listed, but found nowhere"
