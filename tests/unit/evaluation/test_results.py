"""Results files: what is read back is what was written, and damaged ones are refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.errors import ConfigError
from fledge.evaluation.results import (
    Cell,
    Contender,
    Load,
    RequestRecord,
    Results,
    check_writable,
    read_results,
    write_results,
)

WHOLE = Results(
    kind="serve",
    title="t",
    baseline="a",
    contenders=(Contender(name="a", kind="server", target="x", url="http://h", temperature=0.0),),
    cells=(
        Cell(
            contender="a",
            workload="w",
            load=Load(rate=2.0),
            repeat=0,
            seconds=1.5,
            requests=(
                RequestRecord(
                    prompt="p", sent=0.0, first_token=0.5, done=1.0, output_tokens=3, acceptance=((3, 1, 2),)
                ),
            ),
        ),
    ),
    settings={"temperature": 0.0},
    provenance={"device": "cpu"},
    notes=("n",),
)


def test_read_back(tmp_path: Path) -> None:
    write_results(WHOLE, tmp_path / "r.json")
    assert read_results(tmp_path / "r.json") == WHOLE


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("settings",), None),
        (("provenance",), []),
        (("status",), "fine"),
        (("kind",), "other"),
        (("contenders", 0, "name"), 3),
        (("contenders", 0, "speculation"), "x"),
        (("cells", 0, "contender"), "ghost"),
        (("cells", 0, "seconds"), "long"),
        (("cells", 0, "seconds"), float("nan")),
        (("cells", 0, "repeat"), None),
        (("cells", 0, "repeat"), True),
        (("cells", 0, "load", "rate"), "2"),
        (("cells", 0, "requests", 0, "sent"), None),
        (("cells", 0, "requests", 0, "done"), "1"),
        (("cells", 0, "requests", 0, "output_tokens"), "3"),
        (("cells", 0, "requests", 0, "acceptance"), [[1]]),
        (("cells", 0, "requests", 0, "differs"), "perhaps"),
        (("cells", 0, "requests", 0), "request"),
    ],
)
def test_damaged_values_are_refused(tmp_path: Path, place: tuple[str | int, ...], value: object) -> None:
    values: Any = json.loads(json.dumps(WHOLE.to_dict()))
    *way, last = place
    inner = values
    for step in way:
        inner = inner[step]
    inner[last] = value
    path = tmp_path / "r.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="damaged benchmark results") as caught:
        read_results(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    check_writable("--out", tmp_path / "new/r.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file/r.json", Path("/proc/r.json")):
        with pytest.raises(ConfigError, match=f"--out {path}: "):
            check_writable("--out", path)
