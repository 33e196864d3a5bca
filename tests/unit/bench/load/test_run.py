"""What a whole run does with its servers, in one process with them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.bench.load import run as module
from fledge.bench.load.run import ServeRun, ServeSettings
from fledge.bench.load.servers import ServerSpec
from fledge.errors import ConfigError
from fledge.evaluation.results import Load, read_results
from fledge.evaluation.workloads import Prompt, Workload
from fledge.progress import Progress
from tests.odd_server import OddServer

WORKLOAD = Workload(
    name="w",
    prompts=tuple(Prompt(id=name, category="a", messages=({"role": "user", "content": name},)) for name in "xyz"),
    source="here",
    licence="none",
    notes=("two prompts were left out",),
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notes about a machine that is busy with other tests."""
    monkeypatch.setattr("fledge.bench.load.run.TOO_LATE_MS", 1e9)


def settings(*servers: OddServer, loads: tuple[Load, ...]) -> ServeSettings:
    specs = tuple(ServerSpec(name=str(i), url=server.url) for i, server in enumerate(servers))
    return ServeSettings(
        servers=specs, workloads=(WORKLOAD,), loads=loads, requests=4, repeats=2, max_tokens=3, warmup=0
    )


def test_arrivals_are_the_same_for_all_servers_and_others_in_each_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, ...]] = []
    original = module.arrival_times

    def remembered(count: int, rate: float, *, seed: str) -> list[float]:
        drawn.append(tuple(original(count, rate, seed=seed)))
        return list(drawn[-1])

    monkeypatch.setattr(module, "arrival_times", remembered)
    with OddServer() as a, OddServer() as b:
        results = ServeRun(settings=settings(a, b, loads=(Load(rate=100.0),)), provenance={}).run()
    assert results.status == "complete"
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    for cell, times in zip(results.cells, drawn, strict=True):
        assert all(one.sent >= due for one, due in zip(cell.requests, times, strict=True))


def test_results_say_what_a_reader_must_know(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.json"
    with OddServer() as server:
        made = settings(server, loads=(Load(concurrency=2),))
        results = ServeRun(settings=made, provenance={"who": "me"}, out=out).run()
    assert read_results(out) == results
    assert results.notes == ("w: two prompts were left out",)
    assert results.settings["workloads"][0]["digest"] == WORKLOAD.digest
    assert results.settings["requests"] == {"C=2": 4}
    assert results.provenance == {"who": "me"}


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with OddServer() as server:
        made = settings(server, loads=(Load(concurrency=1),))
        run = ServeRun(settings=made, provenance={}, out=tmp_path / "file" / "x.json")
        with pytest.raises(ConfigError, match="cannot be written"):
            run.run()


def test_progress_counts_every_prompt_also_those_that_a_dead_server_never_got(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def dies(server: OddServer, *_: object) -> AsyncIterator[bytes]:
        server.die()
        yield b""

    with OddServer(dies) as server:
        made = replace(settings(server, loads=(Load(concurrency=1),)), requests=9)
        results = ServeRun(settings=made, provenance={}, progress=Progress()).run()
    assert results.status == "failed"
    assert [len(cell.requests) for cell in results.cells] == [3, 0]
    assert "6 not asked: 3 failures in a row" in (results.cells[0].note or "")
    assert "requests: 18 of 18 0 is dead" in capsys.readouterr().err
