"""`fledge inspect` and `fledge convert` as a user meets them: output, exit status, one line for each fault."""

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fledge.checkpoints.drafter import load_drafter, save_drafter
from fledge.checkpoints.target import save_target
from fledge.cli.main import run
from fledge.evaluation.flags import Reading
from fledge.report.intervals import Interval
from tests.broken_checkpoints import EAGLE31, ERRORS, REDUCED, UNREADABLE, WARNINGS, Trap
from tests.checkpoint_fixtures import TARGET, drafter_configs, edit_config, make_drafter
from tests.tiny_models import make_target


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout is exactly one JSON object."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Fledge = Callable[..., Outcome]


@pytest.fixture
def fledge(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fledge:
    def invoke(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fledge", *map(str, arguments)])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # `run` replaces it
        with pytest.raises(SystemExit) as exit_:
            run()
        captured = capsys.readouterr()
        return Outcome(int(exit_.value.code or 0), captured.out, captured.err)

    return invoke


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "target"
    save_target(make_target(TARGET), directory)
    return directory


def named(traps: tuple[Trap, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trap", traps, ids=lambda trap: trap.name)


def test_inspect_says_what_a_drafter_is(fledge: Fledge, target: Path, tmp_path: Path) -> None:
    save_drafter(make_drafter(REDUCED), tmp_path / "drafter")
    outcome = fledge("inspect", tmp_path / "drafter", "--target", target)
    assert outcome.status == 0, outcome
    for part in (
        "EAGLE-3.1",
        "fc_norm, norm_output",
        "inputs of blocks [2, 4, 5] = outputs of blocks [1, 3, 4]",
        "24 of the target's 64 (37.5%)",
        "float32",
        "the target's",
        f"OK: 0 errors, 0 warnings; fits {target}",
    ):
        assert part in outcome.out.replace("\n                ", " ")


def test_inspect_json(fledge: Fledge, target: Path, tmp_path: Path) -> None:
    drafter = make_drafter(REDUCED)
    save_drafter(drafter, tmp_path / "drafter", provenance={"recipe": "tiny"})
    description = fledge("inspect", tmp_path / "drafter", "--target", target, "--json").json
    assert description["kind"] == "drafter"
    assert description["variant"] == "EAGLE-3.1"
    assert description["aux_layer_ids"] == {"inputs": [2, 4, 5], "outputs": [1, 3, 4], "stated": True}
    assert description["vocabulary"] == {"size": 64, "draft_size": 24, "coverage": 0.375}
    parameters = sum(p.numel() for p in drafter.parameters())
    assert description["size"]["parameters"] == parameters
    assert description["size"]["bytes"] == 4 * parameters + 8 * 24 + 64
    assert description["provenance"]["recipe"] == "tiny"
    assert description["fits_target"] is True
    assert description["findings"] == []


@pytest.mark.parametrize("name", drafter_configs())
def test_inspect_prints_every_variant(name: str, fledge: Fledge, tmp_path: Path) -> None:
    save_drafter(make_drafter(drafter_configs()[name]), tmp_path / "drafter")
    outcome = fledge("inspect", tmp_path / "drafter")
    assert outcome.status == 0
    assert "OK: 0 errors" in outcome.out


def test_inspect_of_a_target(fledge: Fledge, target: Path) -> None:
    assert "llama" in fledge("inspect", target).out
    description = fledge("inspect", target, "--json").json
    assert {"serve", "train", "inspect"} <= set(description["verbs"])
    assert description["not_run_because"] is None
    assert description["kind"] == "target"
    assert description["num_layers"] == 8
    outcome = fledge("inspect", target, "--target", target)
    assert outcome.status == 2
    assert "not an EAGLE drafter" in outcome.err


# Facts of configs that the engine does not run: only what a drafter must know of its target is looked at.
_SHAPE = {"num_hidden_layers": 8, "hidden_size": 32, "vocab_size": 64, "max_position_embeddings": 128}
_ROPE = {"rope_theta": 10000.0}
FOREIGN_TARGETS = {
    "unknown-family": {"model_type": "phoenix", **_SHAPE, **_ROPE},
    "hybrid": {"model_type": "qwen3_next", **_SHAPE, **_ROPE, "layer_types": ["linear_attention"] * 8},
    "wrapper": {"model_type": "phoenix_vl", "text_config": {"model_type": "phoenix", **_SHAPE, **_ROPE}},
    "quantised": {"model_type": "llama", **_SHAPE, **_ROPE, "quantization_config": {"quant_method": "hqq", "bits": 4}},
    "rope-by-layer-type": {
        "model_type": "phoenix",
        **_SHAPE,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": {"rope_theta": 100.0}},
    },
}


@pytest.mark.parametrize("name", FOREIGN_TARGETS)
def test_inspect_of_targets_that_the_engine_does_not_run(name: str, fledge: Fledge, tmp_path: Path) -> None:
    save_target(make_target(TARGET), tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(FOREIGN_TARGETS[name]))
    outcome = fledge("inspect", tmp_path / "target")
    assert outcome.status == 0, outcome
    reasons = {"quantised": "quantised with hqq", "hybrid": "has layers with a recurrent state"}
    assert reasons.get(name, "is not a supported target") in " ".join(outcome.out.split())
    description = fledge("inspect", tmp_path / "target", "--json").json
    assert "serve" not in description["verbs"]
    assert ("train" in description["verbs"]) == (name != "quantised")
    assert (description["hidden_size"], description["vocabulary"]) == (32, {"size": 64})
    assert description["aux_layer_ids"]["inputs"] == [2, 4, 5]
    assert description["size"]["parameters"] > 0

    save_drafter(make_drafter(EAGLE31), tmp_path / "drafter")
    outcome = fledge("inspect", tmp_path / "drafter", "--target", tmp_path / "target")
    assert outcome.status == 0, outcome
    assert "OK: 0 errors, 0 warnings; fits" in outcome.out
    other = replace(EAGLE31, vocab_size=48, draft_vocab_size=48)
    save_drafter(make_drafter(other), tmp_path / "other")
    assert fledge("inspect", tmp_path / "other", "--target", tmp_path / "target").status == 1
    assert (
        fledge(
            "convert", tmp_path / "drafter", tmp_path / "out", "--to", "vllm", "--target", tmp_path / "target"
        ).status
        == 0
    )


def test_inspect_of_a_target_without_a_shape(fledge: Fledge, tmp_path: Path) -> None:
    save_target(make_target(TARGET), tmp_path / "target")
    edit_config(tmp_path / "target", model_type="phoenix", hidden_size=None)
    outcome = fledge("inspect", tmp_path / "target")
    assert outcome.status == 2
    assert "required field 'hidden_size' is missing" in outcome.err


@named(UNREADABLE)
def test_unreadable(trap: Trap, fledge: Fledge, target: Path, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    for arguments in (
        ("inspect", tmp_path / "drafter"),
        ("inspect", tmp_path / "drafter", "--target", target, "--json"),
        ("convert", tmp_path / "drafter", tmp_path / "out", "--to", "vllm"),
    ):
        outcome = fledge(*arguments)
        assert outcome.status == 2
        assert outcome.out == ""
        assert outcome.err.startswith("error: ")
        assert trap.says in outcome.err
        assert outcome.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@named(ERRORS)
def test_contract_errors(trap: Trap, fledge: Fledge, target: Path, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    outcome = fledge("inspect", tmp_path / "drafter", "--target", target)
    assert outcome.status == 1
    (line,) = [x for x in outcome.out.splitlines() if x.startswith("error: ") and f"[{trap.finding}]" in x][:1]
    assert trap.says in line
    description = fledge("inspect", tmp_path / "drafter", "--target", target, "--json").json
    assert trap.finding in [finding["name"] for finding in description["findings"]]
    assert description["fits_target"] is False

    outcome = fledge("convert", tmp_path / "drafter", tmp_path / "out", "--to", "vllm", "--target", target)
    if trap.fixed_by_convert:
        assert outcome.status == 0
        assert f"[{trap.finding}]" in outcome.out
        assert fledge("inspect", tmp_path / "out", "--target", target).status == 0
    else:
        assert outcome.status == 2
        assert outcome.err.startswith("error: ")
        assert outcome.err.count("\n") == 1
        assert not (tmp_path / "out").exists()


@named(WARNINGS)
def test_warnings(trap: Trap, fledge: Fledge, target: Path, tmp_path: Path) -> None:
    trap.write(tmp_path / "drafter")
    outcome = fledge("inspect", tmp_path / "drafter", "--target", target)
    assert outcome.status == 0
    (line,) = [x for x in outcome.out.splitlines() if x.startswith("warning: ")]
    assert trap.says in line


def test_readings_of_the_flags_are_printed(
    fledge: Fledge, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(make_drafter(EAGLE31), tmp_path / "drafter")
    outcome = fledge("inspect", tmp_path / "drafter", "--try-flags")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "--try-flags needs a --target" in outcome.err
    readings = (
        Reading(
            flags={"fc_norm": True, "norm_output": False},
            is_stated=False,
            acceptance_length=Interval(value=2.5, low=2.25, high=2.75),
            rate_by_depth=(0.75, 0.5),
        ),
        Reading(flags={"fc_norm": True, "norm_output": True}, is_stated=True, acceptance_length=Interval(value=1.5)),
        Reading(flags={"fc_norm": False}, is_stated=False, acceptance_length=None, failure="it broke"),
    )
    monkeypatch.setattr("fledge.evaluation.flags.try_flags", lambda *_: readings)
    outcome = fledge("inspect", tmp_path / "drafter", "--target", target, "--try-flags")
    assert outcome.status == 0
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert lines[-4:] == [
        "fc_norm 2.50 ±0.25 75% 50%",
        "fc_norm, norm_output 1.50 as config.json says",
        "none - it broke",
        "warning: it was probably trained with: fc_norm; correct these flags in config.json",
    ]
    description = fledge("inspect", tmp_path / "drafter", "--target", target, "--try-flags", "--json").json
    assert [one["name"] for one in description["readings"]] == ["fc_norm", "fc_norm, norm_output", "none"]


def test_convert_writes_down_what_the_source_leaves_open(fledge: Fledge, target: Path, tmp_path: Path) -> None:
    save_drafter(make_drafter(EAGLE31), tmp_path / "drafter")
    edit_config(tmp_path / "drafter", eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    arguments = ("convert", tmp_path / "drafter", tmp_path / "out", "--to", "speculators", "--target", target, "--json")
    result = fledge(*arguments).json
    assert [finding["name"] for finding in result["fixed"]] == ["aux-ids-omitted"]
    assert result["remaining"] == []
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    verifier = fields["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    load_drafter(tmp_path / "out", TARGET)


def test_convert_never_overwrites(fledge: Fledge, tmp_path: Path) -> None:
    save_drafter(make_drafter(EAGLE31), tmp_path / "drafter")
    outcome = fledge("convert", tmp_path / "drafter", tmp_path / "drafter", "--to", "vllm")
    assert outcome.status == 2
    assert "already exists" in outcome.err
    outcome = fledge("convert", tmp_path / "drafter", tmp_path / "out", "--to", "gguf")
    assert outcome.status == 2


def test_eagle1_has_no_speculators_format(fledge: Fledge, tmp_path: Path) -> None:
    save_drafter(make_drafter(drafter_configs()["eagle1"]), tmp_path / "drafter")
    outcome = fledge("convert", tmp_path / "drafter", tmp_path / "out", "--to", "speculators")
    assert outcome.status == 2
    assert "write it with --to vllm" in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]


def test_missing_directory(fledge: Fledge, tmp_path: Path) -> None:
    outcome = fledge("inspect", tmp_path / "nothing")
    assert outcome.status == 2
    assert "no such directory" in outcome.err


def test_a_wrong_target_is_an_error(fledge: Fledge, tmp_path: Path) -> None:
    other = replace(TARGET, vocab_size=80, num_layers=5)
    save_target(make_target(other), tmp_path / "other")
    save_drafter(make_drafter(replace(EAGLE31, aux_layer_ids=(2, 4, 6))), tmp_path / "drafter")
    description = fledge("inspect", tmp_path / "drafter", "--target", tmp_path / "other", "--json")
    assert description.status == 1
    names = [finding["name"] for finding in description.json["findings"]]
    assert names == ["aux-ids-out-of-range", "vocabulary-size"]
