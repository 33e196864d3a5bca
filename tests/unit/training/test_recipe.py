"""Recipes: what is read, what is refused in one line, and that the commented example lists every key."""

import contextlib
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

import fledge as fledge_package
from fledge.errors import ConfigError
from fledge.training.recipe import Recipe
from tests.command_line import fledge

RECIPES = Path(__file__).parents[3] / "recipes"
PACKAGE = Path(fledge_package.__file__).parent
MINIMAL = "output: run\ntarget: {path: target}\ndata: {sources: [data.jsonl]}\n"


def load(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return Recipe.load(path, overrides)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert Recipe.load(path).output == str(path.parent / yaml.safe_load(path.read_text())["output"])


def uncommented(text: str) -> str:
    """The example with the keys that are commented out switched on: `  # key: value   # why`."""
    lines = []
    for line in text.splitlines():
        body = line.lstrip()
        indent = line[: len(line) - len(body)]
        if body.startswith("# ") and ":" in body and (indent or body.startswith(("# name", "# device"))):
            lines.append(indent + body[2:])
        else:
            lines.append(line)
    return "\n".join(lines)


def test_the_example_lists_every_key_with_its_default() -> None:
    text = (RECIPES / "eagle3.1.yaml").read_text()
    written, complete = yaml.safe_load(text), yaml.safe_load(uncommented(text))
    names = {f.name for f in fields(Recipe)}
    assert set(complete) == names
    for section, hint in get_type_hints(Recipe).items():
        if not is_dataclass(hint):
            continue
        assert set(complete[section]) == {f.name for f in fields(hint)}, section
        for f in fields(hint):
            if f.name not in (written[section] or {}):
                default = list(f.default) if isinstance(f.default, tuple) else f.default
                assert complete[section][f.name] == default, f"{section}.{f.name}"


def test_recipes_of_the_package_by_name(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert Recipe.load(Path("eagle3.1")).output == str(tmp_path / "runs" / "eagle3.1")
        with pytest.raises(ConfigError, match=r"eagle9: cannot be read: .*; recipes by name: eagle3.1, tiny"):
            Recipe.load(Path("eagle9"))
        assert fledge("train", "--init", "my.yaml", cwd=tmp_path).returncode == 0
        assert Recipe.load(Path("my.yaml")) == Recipe.load(Path("eagle3.1"))
    for arguments, says in ((("--init", "my.yaml"), "my.yaml already exists"), ((), "name a recipe")):
        outcome = fledge("train", *arguments, cwd=tmp_path)
        assert outcome.returncode == 2
        assert says in outcome.stderr


def test_recipes_are_in_the_wheel() -> None:
    settings = tomllib.loads((RECIPES.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {path.resolve() for pattern in settings["fledge"] for path in PACKAGE.glob(pattern)}
    assert {path.resolve() for path in RECIPES.glob("*.yaml")} <= shipped


def test_defaults_and_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    recipe = load(tmp_path)
    assert recipe.output == str(tmp_path / "run")
    assert recipe.target.path == str(tmp_path / "target")
    assert recipe.data.sources == (str(tmp_path / "data.jsonl"),)
    assert recipe.eval_depths == (7, 14)


def test_a_name_that_is_no_directory_stays_a_hub_name(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL, "target.path=owner/model").target.path == "owner/model"


def test_overrides_are_yaml(tmp_path: Path) -> None:
    recipe = load(
        tmp_path, MINIMAL, "fit.lr=2e-4", "data.sources=[a.jsonl, b.jsonl]", "vocab.size=null", "drafter.variant=eagle3"
    )
    assert recipe.fit.lr == 2e-4
    assert len(recipe.data.sources) == 2
    assert recipe.vocab.size is None
    assert recipe.drafter.variant == "eagle3"


@pytest.mark.parametrize(("depth", "depths"), [(3, (3, 6)), (9, (9, 16)), (16, (16,))])
def test_depths_beyond_the_trained_one(tmp_path: Path, depth: int, depths: tuple[int, ...]) -> None:
    assert load(tmp_path, MINIMAL, f"fit.depth={depth}").eval_depths == depths


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("fit.depth=0", "fit.depth: found 0"),
        ("fit.lr=fast", "fit.lr: found 'fast', expected a number"),
        ("fit.rows=2.5", "fit.rows: found 2.5, expected an integer"),
        ("fit.micro_rows=3", "a divisor of 8"),
        ("drafter.variant=eagle4", "'eagle1' or 'eagle3' or 'eagle3.1'"),
        ("drafter.sliding_window=7", "drafter.sliding_window: found 7, allowed is more than fit.depth (7)"),
        ("fit={optimizer: muon, parallel: fsdp2}", "fit.optimizer: found 'muon', allowed is adamw with fit.parallel"),
        ("data.loss_on=prompts", "data.loss_on: found 'prompts', allowed is 'answers' or 'all'"),
        ("regenerate.gpu_memory_utilization=1.5", "found 1.5, allowed is above 0, up to 1"),
        ("regenerate.gpu_memory_utilization=0", "found 0.0, allowed is above 0, up to 1"),
        ("regenerate.top_p=0.0", "found 0.0, allowed is above 0, up to 1"),
        ("data.template_share=0.5", "0 unless data.templates names some"),
        ("data.drop_system_share=2", "0 to 1"),
        ("eval.depths=[3, 17]", "numbers from 1 to 16"),
        ("fit=fast", "expected a section"),
        ("fit.betas=[0.9]", "found 1 values, expected 2"),
        ("fit.betas=[0.9, 1]", "numbers from 0 to below 1"),
        ("fit.lr=.inf", "fit.lr: found inf, allowed is a finite number"),
        ("fit.kl_weight=inf", "a finite number"),
        ("device=tpu", "device: found 'tpu', allowed is auto, cpu or cuda"),
        ("device=meta", "device: found 'meta', allowed is auto, cpu or cuda"),
        ("target.dtype=int8", "target.dtype: found 'int8', allowed is 'auto' or 'float32'"),
        ("regenerate.enabled=maybe", "expected true or false"),
        ("=3", "expected key=value"),
        ("fit.lr=[", "is not valid YAML"),
        ("name.first=x", "name"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, override)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("output: run", "'target' is missing"),
        ("output: run\ntarget: {}\ndata: {sources: [a]}", "'target.path' is missing"),
        (MINIMAL + "fitt: {}", "unknown key 'fitt'. Did you mean 'fit'?"),
        ("- a\n- b", "expected a mapping"),
        ("output: [", "not valid YAML"),
        (MINIMAL.replace("[data.jsonl]", "[]"), "at least one file"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_survives_the_way_through_yaml(tmp_path: Path) -> None:
    """The model card prints a recipe in full: it must be one that can be run again."""
    recipe = load(tmp_path, MINIMAL, "fit.betas=[0.8, 0.9]", "eval.depths=[2, 5]")
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(recipe.to_dict()))
    assert load(tmp_path, yaml.safe_dump(values)) == recipe
