"""The model card: what a stranger needs to serve the drafter, and nothing that was not measured."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.config import SpeculativeConfig
from fledge.models.config import DrafterConfig
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3_1
from fledge.provenance import device_name, git_commit, shown_command, shown_path
from fledge.training.pipeline import shown_recipe
from fledge.training.recipe import Recipe, TargetSection
from fledge.training.stages.evaluate import MAX_ROWS, base_model, model_card, plot_acceptance
from tests.tiny_models import TINY_TARGET


def statistics(depth: int, accepted: int) -> dict[str, Any]:
    tally = AcceptanceStatistics()
    tally.add(drafted=depth, accepted=accepted, rounds=3)
    tally.add(drafted=depth, accepted=0, rounds=1)
    return tally.to_dict()


def result(categories: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "evaluated": True,
        "best": "step-000500",
        "acceptance_length": 2.5,
        "candidates": {"step-000400": 2.25, "step-000500": 2.5},
        "trained_depth": 2,
        "temperature": 0.0,
        "dtype": "float32",
        "device": "cpu",
        "prompts": 9,
        "turns": 12,
        "depths": {
            str(depth): {
                "total": statistics(depth, 2),
                "fresh": statistics(depth, 1),
                "novel": statistics(depth, 0),
                "repeated": 0.524,
                "copied": 0.714,
                "by_source": {"gsm8k": statistics(depth, 2), "mt_bench": statistics(depth, 1)},
                "by_category": {f"c{i}": statistics(depth, 1) for i in range(categories)},
                "tokens": 100,
                "different_answers": 0,
            }
            for depth in (2, 4)
        },
        **changes,
    }


@pytest.fixture(name="recipe")
def _recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text("output: out/run\ntarget: {path: owner/model}\ndata: {sources: [data.jsonl]}\nname: my-drafter\n")
    return Recipe.load(path, ["fit.depth=2"])


def provenance(recipe: Recipe) -> dict[str, Any]:
    return {
        "fledge_version": "1.2.3",
        "git_commit": None,
        "command": "fledge train recipe.yaml",
        "recipe": shown_recipe(recipe),
        "data": {"sources": {"data.jsonl": "0123456789abcdef"}, "evaluation": {}},
        "summaries": {"prepare": {"examples": 1234, "categories": {}}, "fit": {"steps": 500, "loss": 1.25}},
        "target": {
            "name": base_model(recipe),
            "weights_digest": "w",
            "quantization": None,
            "tokenizer_sha256": "t",
            "chat_template_sha256": "c",
        },
        "versions": {"torch": "2"},
        "device": device_name(),
    }


def card(recipe: Recipe, values: dict[str, Any], config: DrafterConfig | None = None, **options: Any) -> str:
    config = config or replace(EAGLE_3_1.config_for(TINY_TARGET), draft_vocab_size=20)
    return model_card(recipe, config, values, provenance(recipe), **options)


def test_front_matter(recipe: Recipe) -> None:
    text = card(recipe, result())
    _, front, body = text.split("---\n", 2)
    values = yaml.safe_load(front)
    assert values["base_model"] == "owner/model"
    assert values["library_name"] == "fledge"
    assert {"speculative-decoding", "eagle3", "eagle-3.1"} <= set(values["tags"])
    assert body.strip().startswith("# my-drafter")


def test_a_quantised_target_is_named(recipe: Recipe) -> None:
    told = provenance(recipe)
    config = EAGLE_3_1.config_for(TINY_TARGET)
    assert "fewer bits" not in model_card(recipe, config, result(), told)
    told["target"]["quantization"] = "compressed-tensors, 8-bit integers, one scale per row"
    text = model_card(recipe, config, result(), told)
    assert "of that target in fewer bits: compressed-tensors, 8-bit integers, one scale per row." in text


def test_the_commands_are_ones_that_engines_take(recipe: Recipe) -> None:
    text = card(recipe, result())
    line = next(line for line in text.splitlines() if line.startswith("vllm serve"))
    config = SpeculativeConfig.from_json(line.split("'")[1])
    assert (config.method, config.model, config.num_speculative_tokens) == ("eagle3", "my-drafter", 2)
    assert "--speculative-algorithm EAGLE3" in text
    assert "--speculative-num-draft-tokens 3" in text
    assert "version that knows `fc_norm` and `norm_output`" in text
    old = card(recipe, result(), EAGLE_1.config_for(TINY_TARGET))
    assert '"method": "eagle"' in old
    assert "--speculative-algorithm EAGLE " in old
    assert "fc_norm`" not in old


def test_figures_are_those_measured(recipe: Recipe) -> None:
    text = card(recipe, result(), plots=["acceptance.png", "training.png"])
    assert "| source | depth 2 | depth 4 |" in text
    assert "| gsm8k | 2.50 | 2.50 |" in text
    assert "| c1 | 1.75 | 1.75 |" in text
    assert "| **all** | **2.50** | **2.50** |" in text
    assert "| 4 | 75% | 75% | 0% | 0% |" in text
    assert "52% of the answers' tokens are repeated" in text
    assert "71% of the answers' tokens are copied" in text
    assert "a repeated or a copied token acceptance length is 1.00 at depth" in text
    assert "The target copies its prompts: the figures above measure copying too." in text
    assert "such a token acceptance length is 1.75 at depth 2, 1.75 at depth 4. The target loops" in text
    assert "Lossless: all 24 answers" in text
    assert "step-000400 2.25, step-000500 2.50" in text
    assert "](acceptance.png)" in text
    assert "](training.png)" in text
    assert "draft vocabulary 20 of 40" in text
    assert "| prepare | examples | 1,234 |" in text


def test_pictures_that_are_not_there_are_not_shown(recipe: Recipe) -> None:
    assert ".png" not in card(recipe, result())


def test_many_categories_are_cut(recipe: Recipe) -> None:
    assert "and 6 more in evaluation.json" in card(recipe, result(categories=MAX_ROWS + 6))


def test_what_was_not_evaluated_says_so(recipe: Recipe) -> None:
    text = card(recipe, {"evaluated": False, "reason": "no engine", "best": "step-1"})
    assert "Not evaluated: no engine." in text
    assert "Lossless" not in text


def test_the_recipe_in_the_card_can_be_run_and_names_no_machine(recipe: Recipe, tmp_path: Path) -> None:
    text = card(recipe, result())
    block = text.split("```yaml\n")[1].split("```")[0]
    assert str(tmp_path) not in text
    path = tmp_path / "out" / "recipe.yaml"
    path.parent.mkdir()
    path.write_text(block)
    again = Recipe.load(path)
    sources = tuple(os.path.normpath(source) for source in again.data.sources)
    assert replace(again, data=replace(again.data, sources=sources)) == recipe


def test_paths_that_are_shown_name_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "data" / "a.jsonl"), tmp_path / "run") == "../data/a.jsonl"
    assert shown_path("/mnt/secret/a.jsonl", tmp_path) == "a.jsonl"
    assert shown_path("/home/bob/a.jsonl", Path("/home/alice/run")) == "a.jsonl"
    command = [
        "/opt/venv/bin/fledge",
        "train",
        "/mnt/secret/recipe.yaml",
        f"output={tmp_path}/run",
        "target.path=owner/model",
        f"data.sources=[/mnt/secret/a b.jsonl, {tmp_path}/data/c.jsonl, ../d.jsonl]",
        "fit.lr=1e-4",
    ]
    assert shown_command(command) == (
        "fledge train recipe.yaml output=run target.path=owner/model "
        "'data.sources=[a b.jsonl, data/c.jsonl, ../d.jsonl]' fit.lr=1e-4"
    )


def test_numbers_are_readable_and_zeros_left_out(recipe: Recipe) -> None:
    values = provenance(recipe)
    values["summaries"] = {"prepare": {"tokens": 1234567, "answer_tokens": 0}, "fit": {"parameters": 7654321}}
    text = model_card(recipe, EAGLE_3_1.config_for(TINY_TARGET), result(), values)
    assert "| prepare | tokens | 1,234,567 |" in text
    assert "answer tokens" not in text
    assert "- parameters: 7,654,321" in text


def test_the_target_s_name(recipe: Recipe, tmp_path: Path) -> None:
    directory = tmp_path / "my-target"
    directory.mkdir()
    local = replace(recipe, target=TargetSection(path=str(directory)))
    assert base_model(local) == "my-target"
    (directory / "config.json").write_text('{"_name_or_path": "owner/original"}')
    assert base_model(local) == "owner/original"


def test_the_commit_is_that_of_the_source_tree() -> None:
    commit = git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


@pytest.mark.parametrize("categories", [1, 3])
def test_the_plot_is_a_picture(tmp_path: Path, categories: int) -> None:
    plot_acceptance(result(categories), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
