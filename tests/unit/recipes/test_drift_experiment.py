"""The drift experiment: its file, its outcome of made-up probes, and a run of it with tiny models."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from fledge.drift.change import FEW_PROMPTS
from fledge.drift.perturb import UNPERTURBED, Perturbation
from fledge.errors import ConfigError, FledgeError
from fledge.progress import Progress
from fledge.report.intervals import Bootstrap
from recipes.drift import report, run
from recipes.drift.__main__ import main
from recipes.drift.experiment import Arm, Experiment, Fit
from recipes.drift.pooled import DriftExperiment, pool
from tests.tiny_training import ROOT, weights, write_run
from tests.unit.drift.drift_cases import drift_result

SHIPPED = ROOT / "recipes" / "drift" / "experiment.yaml"
OVERRIDES = ("target.path=target", "data.sources=[prompts.jsonl]")
QUICK = Bootstrap(resamples=200)
PRE_NORM, POST_NORM = ({"fc_norm": on, "norm_output": on} for on in (False, True))


def write_experiment(path: Path, **values: object) -> Path:
    variants = {"pre-norm": {"depths": [2], "drafter": PRE_NORM}, "post-norm": {"depths": [2], "drafter": POST_NORM}}
    path.write_text(yaml.safe_dump({"seeds": [0], "variants": variants, "train": {}} | values, sort_keys=False))
    return path


def first_recipe(path: Path, overrides: tuple[str, ...]) -> None:
    experiment = Experiment.load(path, overrides)
    experiment.recipe(experiment.fits[0], path.parent)


def test_the_shipped_experiment_is_the_grid_and_the_ablation() -> None:
    experiment = Experiment.load(SHIPPED, OVERRIDES)
    without = [fit for fit in experiment.fits if "window" not in fit.arm.variant]
    assert len(without) == 24
    recipes = {fit: experiment.recipe(fit, Path("out") / fit.name) for fit in experiment.fits}
    grid = {(r.drafter.fc_norm, r.drafter.norm_output, r.fit.depth, r.fit.seed) for r in map(recipes.get, without)}
    assert grid == {
        (*norms, depth, seed)
        for seed in (0, 1, 2)
        for norms, depths in {
            (False, False): (2, 4, 8),
            (True, True): (2, 4, 8),
            (True, False): (4,),
            (False, True): (4,),
        }.items()
        for depth in depths
    }
    one, other = recipes[without[0]], recipes[without[-1]]
    assert (one.data, one.regenerate, one.vocab, one.capture) == (
        other.data,
        other.regenerate,
        other.vocab,
        other.capture,
    )
    assert one.data.sources == (str(Path("prompts.jsonl").absolute()),)
    assert experiment.base_of(Arm("post-norm", 8)) == Arm("pre-norm", 8)
    assert experiment.base_of(Arm("pre-norm", 8)) is None
    assert experiment.base_of(Arm("post-norm with window", 4)) == Arm("post-norm", 4)
    some = Experiment.load(SHIPPED, (), ["post-norm", "fc_norm alone"])
    assert [arm.variant for arm in some.arms] == ["post-norm"] * 3 + ["fc_norm alone"]
    assert not any(map(some.base_of, some.arms))  # what they are compared with was not asked for


@pytest.mark.parametrize(
    ("values", "overrides", "said"),
    [
        ({"seeds": []}, (), "expected at least one of each"),
        ({"seeds": [1, 1]}, (), "expected different ones"),
        ({"sedes": [1]}, (), "unknown key 'sedes'"),
        ({"train": {"output": "x"}}, (), "train.output: that is --out"),
        ({"probe": {"conditions": ["nois:1"]}}, (), "unknown perturbation 'nois:1'"),
        ({}, (), "'target' is missing"),
        (
            {"train": {"target": {"path": "t"}, "data": {"sources": ["d"]}}},
            ("fit.depth=3",),
            "are `depths` and `seeds`",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(tmp_path, values, overrides, said) -> None:
    path = write_experiment(tmp_path / "experiment.yaml", **values)
    with pytest.raises(ConfigError, match=said) as caught:
        first_recipe(path, overrides)
    assert "\n" not in str(caught.value)


def test_a_variant_that_is_not_there_is_named_with_the_nearest(tmp_path) -> None:
    path = write_experiment(tmp_path / "experiment.yaml")
    with pytest.raises(ConfigError, match=r"no variant is called 'post-nrm'\. Did you mean 'post-norm'"):
        Experiment.load(path, (), ["post-nrm"])


def outcome_of(tmp_path: Path, last: dict[str, tuple[float, ...]]) -> DriftExperiment:
    """`last`: by variant, attention on recent tokens at the last depth in each seed; it begins at 20 %."""
    seeds = list(range(len(last["pre-norm"])))
    experiment = Experiment.load(write_experiment(tmp_path / "experiment.yaml", seeds=seeds))

    def result(recent: float, accepted: int, name: str):
        counts = {f"prompt-{i}": (accepted, 10 + i % 2) for i in range(FEW_PROMPTS)}
        return drift_result(counts, recent=(0.2, recent), sink=(0.1, 0.1), perturbation=name)

    accepted = {"pre-norm": 4, "post-norm": 8}
    runs = {
        arm: {
            UNPERTURBED: [result(recent, accepted[arm.variant], UNPERTURBED) for recent in last[arm.variant]],
            "bos:none": [result(recent, 2, "bos:none") for recent in last[arm.variant]],
        }
        for arm in experiment.arms
    }
    return pool(experiment, runs, {"pad:8k:before": "too long"}, QUICK)


def test_arms_are_judged_and_compared_over_seeds_and_prompts(tmp_path) -> None:
    outcome = outcome_of(tmp_path, {"pre-norm": (0.36, 0.37, 0.38), "post-norm": (0.2, 0.2, 0.21)})
    pre, post = outcome.arms
    assert (pre.unperturbed.attention.status, post.unperturbed.attention.status) == ("drifts", "steady")
    assert pre.unperturbed.accepted_by_seed == (pytest.approx(80 / 210),) * 3
    assert pre.conditions["bos:none"].left.ratio.value == pytest.approx(0.5)
    assert pre.unperturbed.left is None
    (beside,) = outcome.comparisons
    assert (beside.arm, beside.base) == (post.title, pre.title)
    assert beside.recent.high < 0
    assert beside.accepted[UNPERTURBED].ratio.value == pytest.approx(2.0)
    assert beside.accepted["bos:none"].ratio.value == pytest.approx(1.0)
    assert beside.lengths[UNPERTURBED].ratio.value == pytest.approx((1 + 160 / 210) / (1 + 80 / 210))
    said = " ".join(sentence.text for sentence in (*outcome.verdicts, *outcome.side_by_side))
    assert "pre-norm, TTT 2, 3 seeds: drifts at depth 2" in said
    assert "post-norm, TTT 2, 3 seeds: no drift to depth 2" in said
    assert "pre-norm, TTT 2 drifts, post-norm, TTT 2 does not" in said
    assert "Not measured: pad:8k:before (too long)" in said
    assert DriftExperiment.from_dict(json.loads(json.dumps(outcome.to_dict()))) == outcome


def test_seeds_that_disagree_leave_the_verdict_open(tmp_path) -> None:
    outcome = outcome_of(tmp_path, {"pre-norm": (0.1, 0.37, 0.64), "post-norm": (0.2, 0.2, 0.21)})
    assert outcome.arms[0].unperturbed.attention.status == "unclear"
    assert "whether it drifts cannot be told" in outcome.verdicts[1].text


def test_shares_are_done_side_by_side_and_what_ends_one_is_a_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda count, **_: ThreadPoolExecutor(count))
    found: list[int] = []

    def work(share, processes):
        for one in share:
            if one == 3:
                raise torch.OutOfMemoryError
            if one == 5:
                raise ModuleNotFoundError("No module\nnamed 'fledge'")
            found.append(one * processes)
            yield

    def do(shares, processes):
        task = Progress().task("fit", 3, len(found))
        run._side_by_side(work, shares, processes, task, lambda: len(found))

    do([[1, 2], [4]], 2)
    assert sorted(found) == [2, 4, 8]
    assert "fit: 3 of 3" in capsys.readouterr().err
    for processes in (1, 2):
        with pytest.raises(FledgeError, match="fewer --processes if memory was short; the same command goes on"):
            do([[1], [3]], processes)
    with pytest.raises(FledgeError, match="a process failed: ModuleNotFoundError: No module named 'fledge'; the same"):
        do([[5], [1]], 2)
    with pytest.raises(ModuleNotFoundError):
        do([[5]], 1)


@pytest.mark.parametrize(("processes", "sizes"), [(1, [5]), (4, [3, 1, 1])])
def test_shares_are_of_one_condition_and_the_last_are_small(tmp_path, processes, sizes) -> None:
    experiment = Experiment.load(write_experiment(tmp_path / "experiment.yaml", seeds=[0, 1, 2]))
    fits, conditions = experiment.fits[:5], [Perturbation(), Perturbation(steps=("pin",))]
    shares = run.probe_shares(conditions, fits, processes)
    cells = [(share.condition, fit) for share in shares for fit in share.fits]
    assert Counter(cells) == Counter((condition, fit) for condition in conditions for fit in fits)
    assert [len(share.fits) for share in shares] == [size for size in sizes for _ in conditions]


def test_a_run_answers_once_and_does_nothing_twice(tmp_path, monkeypatch, capsys) -> None:
    recipe = yaml.safe_load(write_run(tmp_path).read_text())
    train = {name: recipe[name] for name in ("target", "data", "regenerate", "vocab", "device")}
    train["fit"] = {"length": 64, "rows": 4, "max_steps": 1, "lr": 1.0e-2, "candidates": 1}
    probe = {"depth": 3, "prompts": 2, "max_tokens": 6, "conditions": ["noise:0.5"]}
    values = {"train": train | {"eval": {"enabled": False}}, "probe": probe}
    out, path = tmp_path / "out", write_experiment(tmp_path / "experiment.yaml", **values)
    with pytest.raises(SystemExit, match=r"error: .*run --stage train first"):
        main(path, out=out, stage=["probe"])
    monkeypatch.setattr("fledge.training.stages.fit.plot_training", lambda *_, **__: None)  # a second each
    main(path, out=out)
    assert "too few for a verdict" in capsys.readouterr().out
    assert {"results.json", "report.html", "report.png"} <= {file.name for file in out.iterdir()}
    experiment = Experiment.load(path)
    fits = [Fit(arm, 0) for arm in experiment.arms]
    assert len(list((out / "answers" / "regenerate").iterdir())) == 1
    assert all((out / "drafters" / fit.name / "regenerate").samefile(out / "answers" / "regenerate") for fit in fits)
    assert "fc_norm.weight" not in " ".join(weights(run.drafter_directory(out, fits[0])))
    found = json.loads((out / "probes" / f"{fits[0].name}.json").read_text())["results"]
    assert list(found) == [UNPERTURBED, "noise:0.5"]
    assert len(found[UNPERTURBED]["by_depth"]) == 3
    (kept,) = (out / "probes" / "answers").glob("*.json")  # of both drafters and conditions
    assert kept.name.startswith(UNPERTURBED)

    monkeypatch.setattr(run, "_train_share", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(run.Prober, "load", lambda *_: pytest.fail("probed again"))
    monkeypatch.setattr(report, "write", lambda *_: None)
    main(path, out=out, quiet=True)
