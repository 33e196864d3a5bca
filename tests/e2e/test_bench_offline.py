"""`fledge bench offline` and `fledge bench inflate` from the command line, and what they refuse."""

import json
from pathlib import Path

import pytest

from fledge.bench.inflate import SHAPES
from fledge.evaluation.results import read_results
from tests.command_line import fledge
from tests.unit.bench.offline_cases import SHAPE, Pair, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SHAPES, "tiny", SHAPE)


def small_run(pair: Pair, *drafters: str) -> tuple[str, ...]:
    given = [argument for drafter in drafters or pair.drafters for argument in ("--drafter", drafter)]
    limits = ("--concurrency", "1,2", "--requests", "3", "--repeats", "2", "--max-tokens", "5", "--device", "cpu")
    return ("bench", "offline", "--target", pair.target, *given, "--workload", pair.workload, *limits)


def test_inflate_then_measure_what_was_written(pair: Pair, tmp_path: Path) -> None:
    done = fledge(
        *("bench", "inflate", pair.target, "large", "--shape", "tiny", "--quiet"),
        *("--drafter", pair.drafters[1], "--drafter-out", "large-drafter"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "wrote large-drafter" in done.stderr
    small = fledge(*small_run(pair, pair.drafters[1]), "--depth", "2", "--json", "--out", "small.json", cwd=tmp_path)
    assert small.returncode == 0, small.stderr
    large_pair = Pair(target="large", drafters=("large-drafter", ""), workload=pair.workload)
    large = fledge(*small_run(large_pair, "large-drafter"), "--depth", "2", "--out", "large.json", cwd=tmp_path)
    assert large.returncode == 0, large.stderr
    assert "nflated to the shape tiny" in large.stdout
    one, other = read_results(tmp_path / "small.json"), read_results(tmp_path / "large.json")
    assert {c.inflated for c in other.contenders} == {"tiny"}
    for a, b in zip(one.cells, other.cells, strict=True):
        assert [(r.digest, r.acceptance) for r in a.requests] == [(r.digest, r.acceptance) for r in b.requests]


def test_a_table_the_best_depth_and_where_the_results_are(pair: Pair, tmp_path: Path) -> None:
    done = fledge(*small_run(pair), "--depth", "1,2", "--note", "a quiet machine", "--out", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " per user" in done.stdout
    assert "a quiet machine" in done.stdout
    assert "results: r.json" in done.stderr
    assert read_results(tmp_path / "r.json").status == "complete"


def test_one_json_object(pair: Pair, tmp_path: Path) -> None:
    done = fledge(
        *small_run(pair), "--depth", "2", "--tree", "2x4", "--json", "--quiet", "--inflate", "tiny", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["status"] == "complete"
    assert len(values["rows"]) == 5 * 2
    assert len(values["best"]) == 2 * 2
    assert all(row["different"] == 0 for row in values["agreements"])
    assert Path(tmp_path / values["results"]).is_file()


def test_time_that_is_over_is_no_error_but_labelled(pair: Pair, tmp_path: Path) -> None:
    done = fledge(*small_run(pair), "--minutes", "0", "--json", cwd=tmp_path)
    assert done.returncode == 0
    values = json.loads(done.stdout)
    assert values["status"] == "partial"
    assert any("out of time" in note for note in values["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--depth", "0"), "allowed is 1 to 16"),
        (("--tree", "wide"), "expected WIDTH"),
        (("--schedule", "1:99"), "is 99, allowed is an integer of 1 to 16"),
        (("--workload", "nothing-like-it"), "unknown workload"),
        (("--inflate", "9b"), "unknown shape '9b'"),
        (("--depth", "1,2,3,4,5,6,7,8,9,10,11,12"), "25 contenders are too many"),
        (("--dtype", "int3"), "dtype"),
        (("--out", "."), "is a directory"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    pair: Pair, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = fledge(*small_run(pair), "--quiet", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_target_alone_and_unequal_lists_are_refused(pair: Pair, tmp_path: Path) -> None:
    alone = fledge("bench", "offline", "--target", pair.target, cwd=tmp_path)
    assert alone.returncode == 2
    assert "--target needs a --drafter" in alone.stderr
    lists = fledge(
        "bench", "inflate", pair.target, "large", "--shape", "tiny", "--drafter", pair.drafters[0], cwd=tmp_path
    )
    assert lists.returncode == 2
    assert "1 --drafter but 0 --drafter-out" in lists.stderr
