"""benchmarks/never_slower.py without an engine: which arms a cell has, and how a run that was ended goes on."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fledge.engine.arms import Arm
from fledge.files import read_json

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ARGUMENTS = ["--depths", "1,2,5", "--concurrency", "1,4", "--deepest", "5,2", "--generations", "2", "--least", "9"]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class Loop:
    """In place of an engine; ends with an error after so many runs of an arm."""

    def __init__(self, runs: int) -> None:
        self.left = runs
        self.done: list[tuple[str, int]] = []

    def run(self, policy: Any, phases: Any) -> dict[str, float]:
        arm = max(policy.arms)
        if phases[0].count > 8:  # others are there to warm up
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            self.done.append((phases[0].workload, phases[0].concurrency))
        return {"tokens_per_second": 100.0 + arm.depth, "acceptance_length": 1.0 + arm.depth}


def _run(monkeypatch: pytest.MonkeyPatch, runs: int, *arguments: str) -> Loop:
    import never_slower  # type: ignore[import-not-found, unused-ignore]

    loop = Loop(runs)
    monkeypatch.setattr(never_slower, "make_loop", lambda *_: loop)
    monkeypatch.setattr(sys, "argv", ["never_slower.py", *ARGUMENTS, *arguments])
    never_slower.main()
    return loop


def test_a_cell_has_the_arms_that_may_be_its_best() -> None:
    from never_slower import Cell, Phase, fixed_arms  # type: ignore[import-not-found, unused-ignore]

    greedy, sampled = Phase("w", 0.0, 1, 8), Phase("w", 1.0, 1, 8)
    tree = Arm(5, is_tree=True)
    assert list(fixed_arms(Cell((greedy,), 5), [1, 2, 5], tree)) == ["none", "K=1", "K=2", "K=5", "tree"]
    assert list(fixed_arms(Cell((greedy,), 2), [1, 2, 5], None)) == ["none", "K=1", "K=2"]
    assert list(fixed_arms(Cell((sampled,), 5), [1, 2, 5], tree)) == ["none", "K=1", "K=1 drawn", "K=2 drawn"]
    assert list(fixed_arms(Cell((greedy, sampled), 2), [1, 2, 5], tree)) == ["none", "K=1", "K=2"]


def test_a_run_that_was_ended_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.json"
    with pytest.raises(KeyboardInterrupt):
        _run(monkeypatch, 7, "--out", str(out))
    kept = read_json(out)
    assert kept is not None
    assert sum(len(speeds) for cell in kept["cells"] for speeds in cell["speeds"].values()) == 7
    rest = _run(monkeypatch, 10**6, "--out", str(out))
    done = read_json(out)
    assert done is not None
    counts = {len(speeds) for cell in done["cells"] for speeds in cell["speeds"].values()}
    assert counts == {2}, "each arm of each cell as often as was asked for, and no more"
    assert len(done["cells"]) == 8
    assert len(rest.done) + 7 == sum(len(cell["speeds"]) * 2 for cell in done["cells"])
    assert done["cells"][0]["speeds"]["none"][:1] == kept["cells"][0]["speeds"]["none"][:1]
    assert done["worst"]["to_none"] == pytest.approx(min(cell["to_none"] for cell in done["cells"]))
    assert not _run(monkeypatch, 0, "--out", str(out)).done
    with pytest.raises(SystemExit, match="other arguments"):
        _run(monkeypatch, 0, "--out", str(out), "--max-tokens", "7")


def test_what_is_named_first_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from never_slower import arguments, cells_of  # type: ignore[import-not-found, unused-ignore]

    monkeypatch.setattr(sys, "argv", ["never_slower.py", *ARGUMENTS, "--concurrency", "256,1", "--changing"])
    cells = [(cell.label["concurrency"], cell.label["workload"]) for cell in cells_of(arguments())]
    many, one = [(256, "humaneval")] * 2 + [(256, "mt_bench")] * 2, [(1, "mt_bench")] * 2 + [(1, "humaneval")] * 2
    assert cells == [*many, ("4, 256, 16", "changing"), *one]


def test_no_run_begins_when_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not _run(monkeypatch, 0, "--seconds", "0", "--out", str(tmp_path / "out.json")).done
