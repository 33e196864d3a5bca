"""What begins early and what is timed while an engine starts. The whole of it: benchmarks/ready.py."""

import ctypes
import logging
import threading
from types import SimpleNamespace

import pytest

from fledge.early_cuda import start_cuda_init
from fledge.progress import timed


def begin_and_wait() -> None:
    before = set(threading.enumerate())
    start_cuda_init()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


@pytest.mark.parametrize(("status", "expected"), [(0, ["init", "retain"]), (100, ["init"])])
def test_the_driver_makes_a_context_if_it_finds_a_gpu(
    status: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def init(flags: int) -> int:
        assert flags == 0
        calls.append("init")
        return status

    driver = SimpleNamespace(cuInit=init, cuDevicePrimaryCtxRetain=lambda _context, _device: calls.append("retain"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    begin_and_wait()
    assert calls == expected


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    begin_and_wait()
    assert capfd.readouterr() == ("", "")


def test_a_stage_is_told_with_its_seconds_unless_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("fledge.test")
    with caplog.at_level("DEBUG", "fledge"):
        with timed(log, "done") as stage:
            stage.count = 3
        with pytest.raises(ZeroDivisionError), timed(log, "failed"):
            print(1 / 0)
    (record,) = caplog.records
    assert record.stage is stage  # type: ignore[attr-defined]
    assert 0 <= stage.seconds < 10
    assert record.getMessage().startswith("done (3): ")
