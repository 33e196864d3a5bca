import itertools
import statistics

import pytest

from fledge.bench.load.run import ServeSettings, arrival_times, chosen
from fledge.bench.load.servers import ServerSpec, parse_url
from fledge.errors import ConfigError
from fledge.evaluation.conversations import split_turns
from fledge.evaluation.results import Load
from fledge.evaluation.workloads import Prompt, Workload


def prompt(name: str, category: str = "a") -> Prompt:
    return Prompt(id=name, category=category, messages=({"role": "user", "content": name},))


def workload(*prompts: Prompt) -> Workload:
    return Workload(name="w", prompts=prompts, source="here", licence="none")


def test_arrivals_are_a_poisson_process_and_follow_from_the_seed() -> None:
    times = arrival_times(20_000, 5.0, seed="0/w/5/0")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.03)  # exponential: as wide as its mean
    assert arrival_times(3, 5.0, seed="0/w/5/0") == times[:3]
    assert arrival_times(3, 5.0, seed="0/w/5/1") != times[:3]


def test_prompts_are_spread_over_categories_then_repeated() -> None:
    several = workload(*(prompt(f"a{i}") for i in range(6)), *(prompt(f"b{i}", "b") for i in range(6)))
    assert {one.category for one in chosen(several, 2, 0)} == {"a", "b"}
    assert chosen(several, 2, 0) == chosen(several, 2, 0)
    assert [one.id for one in chosen(workload(prompt("x"), prompt("y")), 5, 0)] == ["x", "y", "x", "y", "x"]


def test_turns_end_where_the_server_must_answer() -> None:
    def roles(*names: str) -> list[list[str]]:
        messages = [{"role": n, "content": ""} for n in names]
        return [[str(m["role"]) for m in part] for part in split_turns(messages, keep_answers=True)]

    assert roles("user") == [["user"]]
    assert roles("system", "user", "user") == [["system", "user"], ["user"]]
    assert roles("user", "assistant", "user") == [["user", "assistant", "user"]]
    assert roles("user", "assistant", "user", "user") == [["user", "assistant", "user"], ["user"]]


def settings(**changes: object) -> ServeSettings:
    servers = tuple(ServerSpec(name=name, url="http://x") for name in ("a", "b", "c"))
    values = {"servers": servers, "workloads": (workload(prompt("x")),), "loads": (Load(concurrency=2),)}
    return ServeSettings(**{**values, **changes})  # type: ignore[arg-type]


def test_servers_take_turns_in_an_order_that_changes() -> None:
    order = settings(repeats=4).schedule(["a", "b", "c"])
    assert "".join(cell.contender for cell in order) == "abc" + "bca" + "cab" + "abc"
    assert [cell.repeat for cell in order] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_the_number_of_requests_follows_the_load() -> None:
    made = settings()
    assert made.prompts_for(Load(concurrency=1)) == 16
    assert made.prompts_for(Load(concurrency=64)) == 256
    assert made.prompts_for(Load(rate=5.0)) == 100
    assert settings(requests=7).prompts_for(Load(rate=5.0)) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 1}, "fewer than --concurrency 2"),
        ({"baseline": "d"}, "no such server"),
        ({"servers": (ServerSpec(name="a", url="http://x"), ServerSpec(name="a", url="http://y"))}, "two servers"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://127.0.0.1:8000", None, "http://127.0.0.1:8000"),
        ("http://h/v1/", None, "http://h"),
        ("ours=https://h:1/prefix/v1", "ours", "https://h:1/prefix"),
        ("http://h/a=b", None, "http://h/a=b"),
    ],
)
def test_addresses(text: str, name: str | None, url: str) -> None:
    assert parse_url(text) == (name, url)


@pytest.mark.parametrize(
    "text", ["", "h:8000", "x=h", "ftp://h", "http://", "http://h:99999", "=http://h", "http://h?a"]
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        parse_url(text)
