"""The pipeline with small stages of its own: what runs, what is skipped, and what a kill leaves behind."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.errors import ConfigError, FledgeError
from fledge.progress import Progress
from fledge.training.pipeline import MANIFEST, Manifest, Pipeline, Stage, StageContext, duration, locked
from fledge.training.recipe import DataSection, Recipe, TargetSection
from tests.forking import Forked

QUIET = Progress(quiet=True)


class Workshop:
    """Four stages that write down what they read: prepare -> capture -> fit -> eval (fit reads prepare too)."""

    def __init__(self, output: Path) -> None:
        self.recipe = Recipe(
            output=str(output), target=TargetSection(path="target"), data=DataSection(sources=("data.jsonl",))
        )
        self.calls: list[str] = []
        self.before: Callable[[str, StageContext], None] = lambda _name, _context: None
        self.stages = (
            self._stage("prepare", (), lambda recipe: {"seed": recipe.data.seed}),
            self._stage("capture", ("prepare",), lambda recipe: {"mode": recipe.capture.mode}),
            self._stage("fit", ("prepare", "capture"), lambda recipe: {"lr": recipe.fit.lr}),
            self._stage("eval", ("fit",), lambda recipe: {"tokens": recipe.eval.max_tokens}),
        )

    def _stage(self, name: str, inputs: tuple[str, ...], settings: Callable[[Recipe], dict[str, Any]]) -> Stage:
        def run(context: StageContext) -> dict[str, Any]:
            self.calls.append(name)
            self.before(name, context)
            assert set(context.inputs) == set(inputs)
            read = {other: (path / "out.txt").read_text() for other, path in context.inputs.items()}
            (context.directory / "out.txt").write_text(f"{name}({', '.join(read.values())})")
            if name == "eval":
                drafter = context.directory / "drafter"
                drafter.mkdir(exist_ok=True)
                (drafter / PROVENANCE_FILE).write_text("{}")
                (drafter / "weights").write_text(read["fit"])
            return {"size": len(read), "note": "text"}

        return Stage(name=name, version=1, depends_on=inputs, settings=settings, run=run)

    def run(self, recipe: Recipe | None = None, **options: Any) -> list[str]:
        self.calls.clear()
        pipeline = Pipeline(
            recipe or self.recipe,
            stages=self.stages,
            progress=options.pop("progress", QUIET),
            command="fledge train recipe.yaml",
        )
        self.report = pipeline.run(**options)
        return list(self.calls)

    def directory(self, name: str, recipe: Recipe | None = None) -> Path:
        return Pipeline(recipe or self.recipe, stages=self.stages).states()[name].directory


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path / "run")


ALL = ["prepare", "capture", "fit", "eval"]


def test_runs_in_order_once_and_publishes(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    assert workshop.run() == ALL
    assert workshop.report.ran == tuple(ALL)
    drafter = workshop.report.drafter
    assert drafter == Path(workshop.recipe.output) / "drafter"
    assert (drafter / "weights").read_text() == "fit(prepare(), capture(prepare()))"
    assert not drafter.is_symlink()

    assert workshop.run(progress=Progress()) == []
    said = capsys.readouterr().err
    assert all(f"{name}: up to date" in said for name in ALL)
    assert workshop.report.drafter == drafter


def test_the_manifest_tells_what_was_done(workshop: Workshop) -> None:
    workshop.run()
    directory = workshop.directory("fit")
    values = json.loads((directory / MANIFEST).read_text())
    assert values["key"] == directory.name
    assert values["settings"] == {"lr": 1e-4}
    assert values["input_keys"] == {name: workshop.directory(name).name for name in ("prepare", "capture")}
    assert values["summary"] == {"size": 2, "note": "text"}
    assert values["command"] == "fledge train recipe.yaml"
    assert values["fledge_version"]
    assert values["seconds"] >= 0


def test_a_changed_setting_runs_that_stage_and_those_after_it(workshop: Workshop) -> None:
    workshop.run()
    changed = replace(workshop.recipe, fit=replace(workshop.recipe.fit, lr=1.0))
    assert workshop.run(changed) == ["fit", "eval"]
    assert workshop.run(replace(workshop.recipe, eval=replace(workshop.recipe.eval, max_tokens=5))) == ["eval"]
    assert workshop.run(replace(workshop.recipe, data=replace(workshop.recipe.data, seed=1))) == ALL
    assert workshop.run() == []  # all of the first is still there


def test_returning_to_an_earlier_recipe_publishes_its_drafter_again(workshop: Workshop) -> None:
    workshop.run()
    first = workshop.report.drafter
    assert first is not None
    (first / "weights").write_text("seen")
    workshop.run()
    assert (first / "weights").read_text() == "seen"  # published once only
    workshop.run(replace(workshop.recipe, data=replace(workshop.recipe.data, seed=1)))
    assert (first / "weights").read_text() != "seen"


def test_forcing_a_stage_runs_what_was_built_on_it(workshop: Workshop) -> None:
    workshop.run()
    assert workshop.run(force=("capture",)) == ["capture", "fit", "eval"]
    assert workshop.run() == []
    # Forced alone, the stages after it are outdated, and the next run sees that.
    assert workshop.run(only="capture", force=("capture",)) == ["capture"]
    assert workshop.run() == ["fit", "eval"]


def test_a_stage_forced_again_starts_from_nothing(workshop: Workshop) -> None:
    workshop.run()
    (workshop.directory("fit") / "old").write_text("")
    workshop.run(force=("fit",))
    assert not (workshop.directory("fit") / "old").exists()


def test_stages_can_be_selected(workshop: Workshop) -> None:
    assert workshop.run(until="capture") == ["prepare", "capture"]
    assert workshop.report.drafter is None
    assert workshop.run(only="fit") == ["fit"]
    assert workshop.run(from_stage="capture") == ["eval"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"only": "fitt"}, "no stage is called 'fitt'. Did you mean 'fit'?"),
        ({"only": "fit", "until": "eval"}, "leave out --from and --until"),
        ({"from_stage": "fit", "until": "prepare"}, "comes after"),
        ({"until": "capture", "force": ("fit",)}, "--force fit: that stage is not among"),
        ({"only": "fit"}, "fit: needs the output of 'prepare', which has not been run"),
    ],
)
def test_selections_that_cannot_be_meant(workshop: Workshop, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        workshop.run(**options)
    assert workshop.calls == []


def test_an_interrupted_stage_goes_on_in_its_directory(workshop: Workshop) -> None:
    def stop(name: str, context: StageContext) -> None:
        if name == "fit":
            (context.directory / "half").write_text("done")
            raise KeyboardInterrupt

    workshop.before = stop
    with pytest.raises(KeyboardInterrupt):
        workshop.run()
    assert workshop.calls == ["prepare", "capture", "fit"]
    assert Manifest.read(workshop.directory("fit")) is None

    def look(name: str, context: StageContext) -> None:
        assert name != "fit" or (context.directory / "half").read_text() == "done"

    workshop.before = look
    assert workshop.run() == ["fit", "eval"]


def test_what_an_interrupted_stage_left_is_not_used_with_other_inputs(workshop: Workshop) -> None:
    """Its key is the same, but the stage before it was made again and need not have come out the same."""

    def stop(name: str, context: StageContext) -> None:
        if name == "fit":
            (context.directory / "half").write_text("done")
            raise KeyboardInterrupt

    workshop.before = stop
    with pytest.raises(KeyboardInterrupt):
        workshop.run()
    workshop.before = lambda _name, _context: None
    workshop.run(only="capture", force=("capture",))

    def look(name: str, context: StageContext) -> None:
        assert name != "fit" or not (context.directory / "half").exists()

    workshop.before = look
    assert workshop.run() == ["fit", "eval"]


def test_removed_intermediate_files_are_not_made_again_for_nothing(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.run()
    shutil.rmtree(workshop.directory("capture"))
    assert workshop.run(progress=Progress()) == []
    assert "capture: not needed" in capsys.readouterr().err
    assert workshop.report.drafter is not None
    changed = replace(workshop.recipe, eval=replace(workshop.recipe.eval, max_tokens=5))
    assert workshop.run(changed) == ["eval"]
    changed = replace(workshop.recipe, fit=replace(workshop.recipe.fit, lr=1.0))
    assert workshop.run(changed) == ["capture", "fit", "eval"]


def test_a_foreign_directory_is_not_overwritten(workshop: Workshop) -> None:
    place = Path(workshop.recipe.output) / "drafter"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("mine")
    with pytest.raises(FledgeError, match="was not written by Fledge"):
        workshop.run()
    assert (place / "thesis.txt").read_text() == "mine"


def test_publishing_survives_a_kill_between_its_renames(workshop: Workshop) -> None:
    workshop.run()
    output = Path(workshop.recipe.output)
    (output / ".drafter.killed.tmp" / "new").mkdir(parents=True)
    os.rename(output / "drafter", output / ".drafter.killed.tmp" / "old")  # as if killed just here
    workshop.run()
    assert (output / "drafter" / "weights").is_file()
    assert sorted(path.name for path in output.iterdir() if "drafter." in path.name) == [".drafter.json"]


def test_the_run_directory_can_be_moved(workshop: Workshop, tmp_path: Path) -> None:
    workshop.run()
    os.rename(workshop.recipe.output, tmp_path / "moved")
    assert workshop.run(replace(workshop.recipe, output=str(tmp_path / "moved"))) == []
    assert (tmp_path / "moved" / "drafter" / "weights").is_file()


def test_two_runs_refuse_each_other_and_a_killed_one_leaves_no_lock(workshop: Workshop) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        with locked(Path(workshop.recipe.output)):
            os.write(writer, b"held")
            time.sleep(60)

    holder = Forked(hold)
    try:
        assert os.read(reader, 4) == b"held"
        os.close(reader)
        os.close(writer)
        with pytest.raises(FledgeError, match=f"process {holder.pid} on .* is training there") as caught:
            workshop.run()
        assert "\n" not in str(caught.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert workshop.run() == ALL


def test_an_unreadable_data_file_is_one_line(workshop: Workshop) -> None:
    missing = replace(workshop.stages[0], settings=lambda _recipe: {"text": Path("/nowhere/data.jsonl").read_text()})
    workshop.stages = (missing, *workshop.stages[1:])
    with pytest.raises(ConfigError, match=r"/nowhere/data.jsonl: cannot be read: No such file"):
        workshop.run()


def test_an_output_that_cannot_be_made_is_one_line(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FledgeError, match="cannot be written to"):
        workshop.run(replace(workshop.recipe, output=str(tmp_path / "file" / "run")))


@pytest.mark.parametrize(("seconds", "text"), [(4.21, "4.2 s"), (200, "3 min 20 s"), (18600, "5 h 10 min")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
