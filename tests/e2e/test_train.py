"""`fledge train` from a target and a file of conversations to a drafter that loads and drafts."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge import LLM, SamplingParams
from fledge.files import SEAL_BYTES
from fledge.training.data.examples import TokenStore
from tests.command_line import fledge
from tests.tiny_training import MAX_POSITIONS, ROPE_THETA, finished_run, weights


@pytest.fixture(scope="module", name="run")
def _run() -> Path:
    return finished_run()


def result(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "result.json").read_text())
    return values


def test_every_stage_ran_and_said_so(run: Path) -> None:
    assert result(run)["ran"] == ["prepare", "regenerate", "vocab", "capture", "fit", "eval"]
    said = (run / "stderr.txt").read_text()
    assert all(f"{stage}: done in" in said for stage in result(run)["ran"])


def test_the_drafter_fits_its_target_without_a_warning(run: Path) -> None:
    checked = fledge("inspect", str(run / "run" / "drafter"), "--target", str(run / "target"), cwd=run)
    assert checked.returncode == 0, checked.stdout
    assert "0 errors, 0 warnings" in checked.stdout


def test_the_drafter_drafts(run: Path) -> None:
    """It has learnt something of what it was shown, and it changes no token."""
    summary = result(run)["stages"]["eval"]["summary"]
    assert summary["acceptance_length"] > 1.1
    assert summary["different_answers"] == 0
    speculation = {"model": str(run / "run" / "drafter"), "num_speculative_tokens": 2}
    params = SamplingParams(temperature=0.0, max_tokens=16)
    prompt = "<user>the cat sat\n<assistant>"
    (plain,) = LLM(run / "target", device="cpu").generate(prompt, params)
    (drafted,) = LLM(run / "target", speculative_config=speculation, device="cpu").generate(prompt, params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.acceptance.rounds > 0


def test_the_drafter_s_config_says_what_the_target_is(run: Path) -> None:
    """Mistakes 4, 6 and 7: aux ids that count otherwise, positions too few, a rope theta that got lost."""
    config = json.loads((run / "run" / "drafter" / "config.json").read_text())
    assert config["rope_theta"] == ROPE_THETA
    assert config["max_position_embeddings"] == MAX_POSITIONS
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (config["sliding_window"], config["layer_types"]) == (6, ["sliding_attention"])
    assert config["fc_norm"] is True
    assert config["norm_output"] is True
    assert config["draft_vocab_size"] == 96


def test_the_directory_is_complete(run: Path) -> None:
    drafter = run / "run" / "drafter"
    assert {path.name for path in drafter.iterdir()} == {
        "config.json",
        "model.safetensors",
        "fledge_provenance.json",
        "README.md",
        "evaluation.json",
        "acceptance.json",
        "training.png",
        "acceptance.png",
    }
    provenance = json.loads((drafter / "fledge_provenance.json").read_text())
    stages = result(run)["stages"]
    assert provenance["stages"] == {name: Path(stage["directory"]).name for name, stage in stages.items()}
    assert provenance["recipe"]["data"]["sources"] == ["data.jsonl"]
    assert len(provenance["target"]["chat_template_sha256"]) == 64
    card = (drafter / "README.md").read_text()
    assert "vllm serve" in card
    assert "Lossless: all" in card
    for path in drafter.iterdir():  # the command had the recipe's absolute path
        assert str(run).encode() not in path.read_bytes(), path.name


def test_a_second_start_skips_everything(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (run / "run").rglob("*") if path.name != "lock"}
    done = fledge("train", "recipe.yaml", cwd=run)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("up to date") == 6
    assert "depth 2" in done.stdout
    assert "--speculative-config" in done.stdout
    assert "  fledge serve " in done.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_plan_says_what_the_run_took(run: Path) -> None:
    """Tokens, bytes and parameters are exact once the data is there."""
    done = fledge("train", "recipe.yaml", "--plan", "--json", cwd=run)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    stages = result(run)["stages"]
    store = TokenStore(Path(stages["regenerate"]["directory"]) / "examples")
    assert plan["data"] == {
        **plan["data"],
        "exact": True,
        "examples": len(store),
        "tokens": store.total_tokens,
        "answer_tokens": store.answer_tokens,
    }
    assert plan["fit"]["steps"] == stages["fit"]["summary"]["steps"]
    assert plan["fit"]["parameters"] == stages["fit"]["summary"]["parameters"]
    stored = sum(t.numel() for name, t in weights(run / "run" / "drafter").items() if name not in ("d2t", "t2d"))
    assert plan["fit"]["parameters"] == stored
    assert [stage["state"] for stage in plan["stages"]] == ["up to date"] * 6


def test_offline_states_take_the_bytes_that_the_plan_names(run: Path) -> None:
    done = fledge("train", "recipe.yaml", "capture.mode=offline", "--plan", "--json", cwd=run)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)["capture"]["bytes"]
    done = fledge("train", "recipe.yaml", "capture.mode=offline", "--until", "capture", "--json", cwd=run)
    assert done.returncode == 0, done.stderr
    stage = json.loads(done.stdout)["stages"]["capture"]
    assert stage["summary"]["bytes"] == planned
    shards = [path for path in Path(stage["directory"]).rglob("*") if path.suffix == ".bin"]
    assert sum(path.stat().st_size - SEAL_BYTES for path in shards) == planned


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["recipe.yaml", "fit.lrr=1"], "unknown key 'fit.lrr'. Did you mean 'lr'?"),
        (["recipe.yaml", "fit.lr"], "expected key=value"),
        (["recipe.yaml", "fit.depth=99"], "allowed is 1 to 16"),
        (["recipe.yaml", "target.path=nowhere"], "nowhere: no such directory"),
        (["recipe.yaml", "data.sources=[none.jsonl]"], "none.jsonl: cannot be read"),
        (["recipe.yaml", "--only", "bake"], "no stage is called 'bake'"),
        (["recipe.yaml", "--plan", "target.path=nowhere"], "nowhere: no such directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Path, arguments: list[str], expected: str) -> None:
    done = fledge("train", *arguments, cwd=run)
    assert done.returncode == 2
    assert done.stdout == ""
    assert expected in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
