"""Giving way to neighbours: fewer threads while they keep each other waiting, and all again when they no longer do."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fledge.bench.rounds import make_pair
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.native import team
from fledge.native.library import library
from fledge.native.linear import packed_linear
from fledge.native.team import FIRST_PAUSE, LATE_WINDOWS, LONGEST_PAUSE, WINDOW, Team
from tests.engine_cases import speculation
from tests.unit.native.native_cases import pack

LONGEST = (LONGEST_PAUSE + 1) * LATE_WINDOWS * WINDOW  # seconds between two trials, about


@pytest.fixture(autouse=True)
def _eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


class Cores:
    """Calls of a millisecond, one after another, most of which threads sleep where there are more than fit."""

    def __init__(self, fit: int) -> None:
        self.team, self.fit = Team(), fit

    def sizes(self, seconds: float) -> list[int]:
        """The team of each call."""
        sizes = []
        for _ in range(round(seconds / 0.001)):
            sizes.append(self.team.size)
            waited = 0.0009 * (sizes[-1] - 1) if sizes[-1] > self.fit else 0.0
            self.team.observe(seconds=0.001, waited=waited)
        return sizes


def test_all_threads_while_nobody_waits() -> None:
    assert set(Cores(fit=8).sizes(1.0)) == {8}


@pytest.mark.parametrize("fit", [1, 2, 4])
def test_no_more_threads_than_fit_but_for_rare_trials(fit: int) -> None:
    cores = Cores(fit)
    cores.sizes(2 * LONGEST)
    later = cores.sizes(10 * LONGEST)
    assert later.count(fit) > 0.96 * len(later)
    assert 2 * fit in later


def test_when_the_neighbours_have_gone_all_threads_are_back_and_a_hiccup_is_soon_forgotten() -> None:
    cores = Cores(fit=1)
    cores.sizes(10.0)
    cores.fit = 8
    assert set(cores.sizes(LONGEST + 4 * WINDOW)[-10:]) == {8}
    cores.sizes(1.0)
    cores.fit = 4
    assert cores.sizes((LATE_WINDOWS + 1.5) * WINDOW)[-1] == 4
    cores.fit = 8
    assert cores.sizes((FIRST_PAUSE * LATE_WINDOWS + 2) * WINDOW)[-1] == 8


def test_one_call_whose_threads_wait_is_no_neighbour() -> None:
    """It wrote to memory for the first time, say."""
    patient = Team()
    for call in range(100):
        patient.observe(seconds=0.05, waited=0.045 * 7 if call % 2 else 0.0)
        assert patient.size == 8


def test_waits_that_are_not_most_of_the_time_are_borne() -> None:
    patient = Team()
    for _ in range(1000):
        patient.observe(seconds=0.001, waited=0.0005 * 7)
        assert patient.size == 8


@pytest.mark.skipif(library() is None, reason="no C compiler here")
def test_a_call_whose_threads_wait_makes_the_next_team_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of one panel: one of two threads has everything to do, the other sleeps meanwhile."""
    torch.set_num_threads(2)
    monkeypatch.setattr(team, "_team", lambda: own)
    packed, x = pack(torch.randn(8, 4096), None), torch.randn(512, 4096)
    sizes = []
    own, ends = Team(), time.perf_counter() + 20
    while 1 not in sizes and time.perf_counter() < ends:
        sizes.append(own.size)
        found = packed_linear(x, packed)
    assert sizes[0] == 2
    assert sizes[-1] == 1
    assert torch.equal(packed_linear(x[:1], packed), found[:1])


@pytest.mark.skipif(library() is None, reason="no C compiler here")
def test_torch_has_one_thread_between_calls_that_have_all_of_them() -> None:
    with team.torch_alone():
        assert torch.get_num_threads() == 1
        assert team._team().size == 8 >> team._team()._halvings
    assert torch.get_num_threads() == 8
    with pytest.raises(ValueError, match="within"), team.torch_alone():
        raise ValueError("within")
    assert torch.get_num_threads() == 8


@pytest.mark.skipif(library() is None, reason="no C compiler here")
def test_threads_that_begin_meanwhile_have_all_of_torchs_and_end_nobody_elses_solitude() -> None:
    seen: list[int] = []

    def another() -> None:  # engine, or what the user does beside it
        seen.append(torch.get_num_threads())
        with team.torch_alone():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    with team.torch_alone():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 1
        assert team._team().size == 8 >> team._team()._halvings
    assert seen == [8, 1, 8]


def test_an_engine_in_the_library_leaves_torch_one_thread_while_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(LLMEngine, "_step", lambda _: seen.append(torch.get_num_threads()))
    for pack_weights in (True, False):
        target, drafter = make_pair("29m", torch.float32, torch.device("cpu"))
        config = EngineConfig(speculative_config=speculation(1), num_blocks=20, pack_weights=pack_weights)
        LLMEngine(target, drafter, config).step()
    assert seen == [1 if library() is not None else 8, 8]
    assert torch.get_num_threads() == 8


_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_ON_ONE_CORE = """
import os, time
import fledge  # before torch
import torch
from fledge.native.library import required
logits, out = torch.randn(64, 8192), torch.empty(64, dtype=torch.long)
def seconds(threads):
    begun = time.perf_counter()
    for _ in range(30):
        required().fledge_argmax_rows(logits, None, out, None, 64, 8192, threads)
    return time.perf_counter() - begun
seconds(2)
core = min(os.sched_getaffinity(0))
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {core})
print(min(seconds(2) for _ in range(3)) / min(seconds(1) for _ in range(3)))
"""


def test_two_threads_that_the_system_puts_on_one_core_do_not_spin_in_each_others_way() -> None:
    """They take some twice as long as one. With OpenMP as it is 34 times was measured."""
    environment = {name: value for name, value in os.environ.items() if name not in _SPINNING}
    done = subprocess.run(
        [sys.executable, "-c", _ON_ONE_CORE], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 8


def test_the_environment_is_left_as_it_was() -> None:
    show = "import os, fledge; print([os.environ.get(name) for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')])"
    for own in {}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}:
        environment = {name: value for name, value in os.environ.items() if name not in _SPINNING} | own
        done = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str([own.get(name) for name in _SPINNING])
