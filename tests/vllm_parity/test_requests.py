"""Fledge and a live vLLM server answer the same requests alike, but for the differences that are meant.

Those are in tools/vllm-differences.yaml, which docs/compatibility.md shows. Run by `make test-vllm`.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.vllm_parity.comparison import Difference, Meant, ask, compare, read_meant
from tests.vllm_parity.request_cases import RequestCase, all_requests
from tests.vllm_parity.servers import both_servers

VLLM_PYTHON = os.environ.get("FLEDGE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
]

CASES = all_requests()
TABLE = Path(__file__).parents[2] / "tools" / "vllm-differences.yaml"
MEANT = read_meant(TABLE.read_text(encoding="utf-8"))
AT_ONCE = 4  # requests under way at each server


class Results(NamedTuple):
    unexplained: Mapping[str, list[Difference]]  # by request
    shown: frozenset[Meant]  # the entries that some request is an example of


@pytest.fixture(name="results", scope="module")
def _results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    logs = tmp_path_factory.mktemp("servers")
    with both_servers(str(VLLM_PYTHON), logs) as clients, ThreadPoolExecutor(len(clients)) as pool:
        ours, theirs = pool.map(answers, clients)
    unexplained: dict[str, list[Difference]] = {}
    shown: set[Meant] = set()
    for case in CASES:
        unexplained[case.name] = []
        for found in compare(case, ours[case.name], theirs[case.name]):
            reasons = [one for one in MEANT if one.explains(case, found)]
            shown.update(reasons)
            unexplained[case.name] += [] if reasons else [found]
    return Results(unexplained, frozenset(shown))


def answers(client: httpx.Client) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip((case.name for case in CASES), pool.map(lambda case: ask(client, case), CASES), strict=True))


def test_there_are_three_hundred_and_more() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 300


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_answers_are_the_same(results: Results, case: RequestCase) -> None:
    found = results.unexplained[case.name]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("meant", MEANT, ids=lambda meant: f"{meant.field}-{meant.here}-{meant.requests}")
def test_what_is_said_to_differ_still_does(results: Results, meant: Meant) -> None:
    assert meant in results.shown, "no request shows this difference any more: take it from the table"
