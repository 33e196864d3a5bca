"""benchmarks/beside_vllm.py without any engine: its loop, its table, and a process that dies."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class Echo:
    """Answers each prompt with itself, a token a step."""

    version = "1"

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.most = 0

    def draft(self, _depth: int) -> None: ...

    def add(self, name: str, ids: list[int], max_tokens: int, *, ignore_eos: bool) -> None:
        assert not ignore_eos
        self.running[name], self.said[name] = ids[:max_tokens], []
        self.most = max(self.most, len(self.running))

    def step(self) -> list[tuple[str, list[int]]]:
        ended = []
        for name, ids in list(self.running.items()):
            self.said[name].append(ids[len(self.said[name])])
            if self.said[name] == ids:
                ended.append((name, self.running.pop(name)))
        return ended

    def acceptance_length(self) -> float | None:
        return None


def test_the_loop_keeps_so_many_in_flight_and_cycles_through_the_prompts() -> None:
    from beside_worker import closed_loop

    engine = Echo()
    found = closed_loop(engine, [[1, 2, 3], [1], [7, 8]], concurrency=2, first=1, requests=4, max_tokens=2)
    assert engine.most == 2
    assert engine.said == {"0": [1], "1": [7, 8], "2": [1, 2], "3": [1]}
    assert found["tokens"] == 6
    assert found["distinct"] == 0.5  # of the first tokens, which all have, two of four


def test_a_ratio_is_that_of_the_same_repeats() -> None:
    from beside_vllm import table

    def row(engine: str, repeat: int, **figures: float) -> dict[str, Any]:
        return {"part": "8b", "K": 0, "C": 1, "engine": engine, "repeat": repeat, "requests": 6, **figures}

    rates = [row("vllm", 0, user_tokens_per_second=100.0), row("vllm", 1, user_tokens_per_second=300.0)]
    lines = table([*rates, row("fledge", 0, user_tokens_per_second=120.0)]).splitlines()
    assert "| 200 | 120 | 1.200 | 1.20 |" in lines[2]
    steps = [row("vllm", 0, ms_a_step=3.0), row("fledge", 0, ms_a_step=2.0)]
    assert "| 3 | 2 | 1.500 | 1.50 | 6 |" in table(steps)  # less time is faster
    assert "| - | 120 |  |" in table([row("fledge", 0, user_tokens_per_second=120.0)])
    assert len(table([{"part": "8b", "K": 0, "engine": "vllm", "error": "it has ended"}]).splitlines()) == 2


def test_an_engine_that_dies_says_why(tmp_path: Path) -> None:
    from beside_worker import Worker, WorkerError

    worker = Worker("x", sys.executable, {"prompts": str(tmp_path / "none.json")}, {}, tmp_path, late=False)
    with pytest.raises(WorkerError, match=r"(?s)it has ended.*none\.json"):
        worker.wait_until_ready(30)
    worker.close()


def test_nothing_is_timed_before_other_work_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import beside_vllm

    file, slept = tmp_path / "ended", []

    def sleep(_seconds: float) -> None:
        slept.append(file.exists())
        if len(slept) == 3:
            file.touch()

    monkeypatch.setattr(beside_vllm.time, "sleep", sleep)
    beside_vllm.wait_for(None)
    assert not slept
    beside_vllm.wait_for(file)
    beside_vllm.wait_for(file)
    assert slept == [False] * 3


def test_ours_works_ahead_once_for_each_depth_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    import beside_worker

    calls: list[object] = []

    def work_ahead() -> bool:
        calls.append("ahead")
        return True

    clock = iter(range(1000))
    monkeypatch.setattr(beside_worker.time, "monotonic", lambda: float(next(clock)))
    engine = SimpleNamespace(work_ahead=work_ahead, runner=SimpleNamespace(graphs=None))
    ours = beside_worker.Fledge.__new__(beside_worker.Fledge)
    ours.llm, ours._drafter, ours._depth, ours._is_random = SimpleNamespace(engine=engine), "d", None, False
    ours._ahead_seconds = 40.0
    monkeypatch.setattr(ours, "_build", calls.append)
    ours.draft(3)
    ours.draft(3)
    assert calls[0] == 3
    assert calls.count("ahead") == int(ours._ahead_seconds)
