"""`fledge bench rounds` on a CPU, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.command_line import fledge


def test_a_table_then_one_json_line(tmp_path: Path) -> None:
    done = fledge("bench", "rounds", "--depth", "0,2", "--concurrency", "1,2", "--rounds", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.strip().splitlines()
    assert "C=2" in "".join(table)
    cells = json.loads(line)["rounds"]
    assert [(cell["depth"], cell["concurrency"]) for cell in cells] == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert all(cell["mean_milliseconds"] > cell["schedule_milliseconds"] > 0 for cell in cells)


def test_rounds_of_a_pair_in_fewer_bits(tmp_path: Path) -> None:
    widths = ("--quantize", "int4", "--quantize-drafter", "fp8")
    done = fledge("bench", "rounds", "--depth", "2", "--concurrency", "1", "--rounds", "10", *widths, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.strip().splitlines()
    assert "target in int4" in " ".join(" ".join(table).split())
    report = json.loads(line)
    assert (report["quantize"], report["quantize_drafter"]) == ("int4", "fp8")
    assert report["rounds"][0]["weights_gigabytes"] < 0.05, "0.12 in float32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "9b"), "unknown shape '9b'"),
        (("--depth", "x"), "whole numbers"),
        (("--depth", "99"), "allowed is 0 to 16"),
        (("--concurrency", "0"), "allowed is 1 to 512"),
        (("--device", "tpu"), "device"),
    ],
)
def test_mistakes_are_one_line_and_status_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = fledge("bench", "rounds", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
