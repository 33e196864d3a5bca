"""`fledge bench serve` against our own servers, and against servers that misbehave."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fledge.evaluation.results import Cell, Results, read_results
from tests.command_line import fledge
from tests.forking import ForkedCommand
from tests.odd_server import HEAD, OddServer, Script, event, good, piece, usage
from tests.serving import MODEL, Serving, make_llm, make_service

PROMPTS = [
    {"id": "one", "category": "a", "messages": [{"role": "user", "content": "Hello there"}]},
    {
        "id": "two",
        "category": "b",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "And?"}],
    },
]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notes about a machine that is busy with other tests."""
    monkeypatch.setattr("fledge.bench.load.run.TOO_LATE_MS", 1e9)


@pytest.fixture(name="prompts")
def _prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return str(file)


@pytest.fixture(name="single")
def _single(tmp_path: Path) -> str:
    file = tmp_path / "single.jsonl"
    file.write_text(json.dumps(PROMPTS[0]) + "\n")
    return str(file)


@pytest.fixture(name="pair", scope="module")
def _pair() -> Iterator[tuple[Serving, Serving]]:
    """One that does not speculate and one that does."""
    with Serving(make_service(make_llm(speculative=False))) as plain, Serving() as drafting:
        yield plain, drafting


def bench(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Results]:
    out = tmp_path / "out.json"
    done = fledge("bench", "serve", "--out", str(out), "--max-tokens", "8", *arguments, cwd=tmp_path)
    assert out.is_file(), done.stderr
    return done, read_results(out)


def cells(results: Results, name: str) -> list[Cell]:
    return [cell for cell in results.cells if cell.contender == name]


def test_our_servers_with_and_without_speculation(tmp_path: Path, prompts: str, pair: tuple[Serving, Serving]) -> None:
    plain, drafting = pair
    arguments = ("--url", f"plain={plain.url}", "--url", f"drafting={drafting.url}/v1", "--workload", prompts)
    arguments += ("--concurrency", "1,2", "--rate", "50", "--requests", "4", "--repeats", "2", "--ignore-eos")
    done, results = bench(tmp_path, *arguments, "--api-key", "sk-secret", "--header", "X-Token: hidden")
    assert done.returncode == 0, done.stderr
    assert "drafting" in done.stdout
    assert results.status == "complete", results.notes
    assert results.baseline == "plain"
    assert [(c.name, c.kind, c.target, list(c.versions)) for c in results.contenders] == [
        ("plain", "server", MODEL, ["fledge"]),
        ("drafting", "server", MODEL, ["fledge"]),
    ]
    order = [(cell.contender, str(cell.load), cell.repeat) for cell in results.cells]
    loads = ("C=1", "C=2", "50/s")
    assert order == [(n, load, 0) for load in loads for n in ("plain", "drafting")] + [
        (n, load, 1) for load in loads for n in ("drafting", "plain")
    ]
    for cell in results.cells:
        assert (
            sorted(record.prompt for record in cell.requests) == ["one"] * 2 + ["two turn 1"] * 2 + ["two turn 2"] * 2
        )
        for record in cell.requests:
            assert record.output_tokens == 8
            assert record.first_token is not None
            assert record.done is not None
            assert 0 <= record.sent < record.first_token <= record.done <= cell.seconds + record.sent
        speculated = cell.acceptance_statistics
        assert (speculated.rounds > 0) == (cell.contender == "drafting")
        if speculated.rounds:
            assert speculated.depth == 3
    # Lossless: the same text for the same prompt, with history, under any load.
    assert len({(r.prompt, r.digest) for cell in results.cells for r in cell.requests}) == 3
    assert "secret" not in (tmp_path / "out.json").read_text()
    assert "hidden" not in (tmp_path / "out.json").read_text()


def test_one_server_under_two_names_with_different_fields(
    tmp_path: Path, single: str, pair: tuple[Serving, Serving]
) -> None:
    url = pair[1].url
    arguments = ("--url", f"off={url}", "--url", f"on={url}", "--model", "on=alias", "--baseline", "on")
    arguments += ("--extra-body", 'off={"speculation": {"enabled": false}}', "--endpoint", "completions")
    done, results = bench(
        tmp_path, *arguments, "--workload", single, "--concurrency", "1", "--requests", "2", "--repeats", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert [c.target for c in results.contenders] == [MODEL, "alias"]
    assert not cells(results, "off")[0].acceptance_statistics.rounds
    assert cells(results, "on")[0].acceptance_statistics.rounds
    shown = json.loads(done.stdout)
    assert shown["status"] == "complete"
    assert [(row["contender"], row["baseline"]) for row in shown["ratios"]] == [("off", "on")]


def test_all_servers_get_the_same_and_never_at_once(tmp_path: Path, prompts: str) -> None:
    busy: list[int] = []

    async def script(server: OddServer, number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.01)
        busy.append(sum(one.in_flight > 0 for one in (a, b)))
        async for part in good(server, number, body):
            yield part

    with OddServer(script) as a, OddServer(script) as b:
        arguments = ("--url", a.url, "--url", b.url, "--workload", prompts, "--concurrency", "3", "--requests", "9")
        done, results = bench(tmp_path, *arguments, "--seed", "5", "--temperature", "0.7", "--warmup", "2")
    assert done.returncode == 0, done.stderr
    assert results.status == "complete"
    assert set(busy) == {1}
    assert a.most_in_flight == b.most_in_flight == 3

    def sent(server: OddServer) -> list[str]:
        return sorted(json.dumps(body, sort_keys=True) for body in server.bodies)

    assert sent(a) == sent(b)
    assert len(a.bodies) == 3 * (5 + 2 * 4) + (
        1 + 2
    )  # of each repeat, five prompts of one turn and four of two; warm-up
    body = a.bodies[-1]
    assert (body["temperature"], body["seed"], body["max_tokens"], body["model"]) == (0.7, 5, 8, "odd")
    assert body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body
    assert "speculation" not in body
    longer = [body["messages"] for body in a.bodies if len(body["messages"]) > 1]
    assert longer[0] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "0 1 2 3 4 5 6 7 "},
        {"role": "user", "content": "And?"},
    ]


def test_acceptance_comes_from_metrics_where_answers_do_not_tell(tmp_path: Path, single: str) -> None:
    async def script(server: OddServer, number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
        rounds, per_position = 10 * (number + 2), (8 * (number + 2), 2 * (number + 2))
        async for part in good(server, number, body):
            yield part
        server.metrics = metrics(rounds, per_position)

    def metrics(rounds: int, per_position: tuple[int, ...]) -> str:
        lines = [f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {rounds}.0']
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{model_name="m",position="{i}"}} {count}.0' for i, count in enumerate(per_position)]
        return "\n".join(lines) + "\n"

    with OddServer(script, metrics=metrics(10, (8, 2))) as server:
        arguments = ("--url", server.url, "--workload", single, "--concurrency", "1", "--requests", "3")
        done, results = bench(tmp_path, *arguments, "--repeats", "2", "--warmup", "0")
    assert done.returncode == 0, done.stderr
    assert [cell.acceptance for cell in results.cells] == [((2, 0, 6), (2, 1, 18), (2, 2, 6))] * 2


def failing(after: int, how: Script) -> Script:
    """Good for so many requests, then something else."""

    async def script(server: OddServer, number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for part in (good if number < after else how)(server, number, body):
            yield part

    return script


async def broken_json(*_: object) -> AsyncIterator[bytes]:
    yield HEAD + piece() + b"data: {oops\n\n"


async def cut_short(*_: object) -> AsyncIterator[bytes]:
    yield HEAD + piece() + piece()


async def too_busy(*_: object) -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n"


async def stalls(*_: object) -> AsyncIterator[bytes]:
    yield HEAD + piece()
    await asyncio.sleep(60)


async def dies(server: OddServer, *_: object) -> AsyncIterator[bytes]:
    server.die()
    yield HEAD + piece() + event({"choices": []})


async def lies(*_: object) -> AsyncIterator[bytes]:
    yield HEAD + piece() * 9 + piece("", "stop") + usage(1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (broken_json, "malformed JSON"),
        (cut_short, "ended without a finish reason"),
        (too_busy, "HTTP 429, Retry-After 3"),
        (stalls, "stalled: nothing for 0.5 s"),
        (lies, "usage tells 1 tokens, but 9 pieces"),
        (dies, "3 failures in a row"),
    ],
)
def test_a_server_that_fails_is_labelled_and_the_other_one_goes_on(
    tmp_path: Path, single: str, how: Script, message: str
) -> None:
    with OddServer(failing(14, how)) as bad, OddServer() as fine:
        arguments = ("--url", f"bad={bad.url}", "--url", f"fine={fine.url}", "--workload", single, "--warmup", "0")
        arguments += ("--concurrency", "2", "--requests", "12", "--repeats", "3")
        arguments += ("--timeout", "0.5" if how is stalls else "20")  # a busy machine may take more than the first
        started = time.monotonic()
        done, results = bench(tmp_path, *arguments)
        assert time.monotonic() - started < 15
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: this run is partial")
    assert message in done.stdout
    assert results.status == "partial"
    assert [cell.status for cell in cells(results, "fine")] == ["complete"] * 3
    first, second, third = cells(results, "bad")
    assert (first.status, second.status, third.status) == ("complete", "partial", "failed")
    assert message in (second.note or "") + (third.note or "")
    assert len(second.good) == 2
    assert all(record.done is None for record in second.requests if record.error)
    if how is dies:  # nothing more is tried
        assert third.requests == ()
        assert any("bad died in the run" in note for note in results.notes)
        assert "not asked: 3 failures in a row" in (second.note or "")
        assert "not measured: 3 failures in a row" in (third.note or "")


def test_errors_need_not_fail_a_job_but_are_still_labelled(tmp_path: Path, single: str) -> None:
    with OddServer(too_busy) as server:
        arguments = ("--url", server.url, "--workload", single, "--concurrency", "1", "--requests", "2")
        done, results = bench(tmp_path, *arguments, "--repeats", "1", "--no-fail-on-errors")
    assert done.returncode == 0
    assert results.status == "failed"
    assert results.cells[0].status == "failed"
    assert "2 of 2 requests failed: 2 x HTTP 429" in (results.cells[0].note or "")


def test_a_conversation_ends_with_its_first_failed_turn(tmp_path: Path, prompts: str) -> None:
    with OddServer(too_busy) as server:
        arguments = ("--url", server.url, "--workload", prompts, "--concurrency", "1", "--requests", "2")
        _, results = bench(tmp_path, *arguments, "--repeats", "1", "--warmup", "0")
    errors = {record.prompt: record.error for record in results.cells[0].requests}
    assert errors["two turn 2"] == "not asked: an earlier turn failed"
    assert len(server.bodies) == 2


def test_tokens_that_were_only_counted_are_labelled(tmp_path: Path, single: str) -> None:
    async def silent(*_: object) -> AsyncIterator[bytes]:
        yield HEAD + piece() * 3 + piece("", "stop")

    with OddServer(silent) as server:
        arguments = ("--url", f"x={server.url}", "--workload", single, "--concurrency", "1", "--requests", "2")
        done, results = bench(tmp_path, *arguments, "--repeats", "2")
    assert done.returncode == 0
    assert [record.output_tokens for cell in results.cells for record in cell.requests] == [3] * 4
    (note,) = results.notes
    assert note.startswith("x: tokens are pieces of text counted")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_was_measured_survives_a_signal(tmp_path: Path, single: str, number: signal.Signals) -> None:
    with OddServer(failing(5, stalls)) as server:
        arguments = ("--url", server.url, "--workload", single, "--concurrency", "1", "--requests", "2")
        limits = ("--max-tokens", "8", "--repeats", "3", "--warmup", "0")
        process = ForkedCommand("bench", "serve", "--out", "out.json", *arguments, *limits, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while len(server.bodies) < 6:
            assert time.monotonic() < deadline, "it does not come so far"
            time.sleep(0.02)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    results = read_results(tmp_path / "out.json")
    assert results.status == "partial"
    if number == signal.SIGKILL:
        assert [cell.status for cell in results.cells] == ["complete"] * 2
        assert "killed: 2 of 3 cells were begun; not measured: " in results.notes[-1]
    else:
        assert process.returncode == 130, stderr
        assert "what was measured is saved" in stderr
        assert [cell.status for cell in results.cells] == ["complete", "complete", "partial"]
        assert (results.cells[-1].note or "").startswith("1 of 2 requests failed: 1 not finished: interrupted")
        assert results.notes[-1] == "interrupted: 3 of 3 cells were begun"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "nonsense"), "--url nonsense: expected an address"),
        (("--url", "http://127.0.0.1:9"), "no server can be reached there"),
        (("--url", "{odd}", "--model", "od"), "--model od: not served at"),
        (("--url", "{odd}", "--url", "{odd}"), "two servers are called"),
        (("--url", "{odd}", "--baseline", "x"), "--baseline x: no such server"),
        (("--url", "{odd}", "--concurrency", "0"), "--concurrency: found 0"),
        (("--url", "{odd}", "--rate", "x"), "--rate: found 'x'"),
        (("--url", "{odd}", "--requests", "3"), "fewer than --concurrency 4"),
        (("--url", "{odd}", "--endpoint", "x"), "--endpoint: found 'x'"),
        (("--url", "{odd}", "--header", "x"), "--header: expected NAME:VALUE"),
        (("--url", "{odd}", "--extra-body", "[]"), "--extra-body"),
        (("--url", "{odd}", "--workload", "none.jsonl"), "none.jsonl"),
        (("--url", "{odd}", "--out", "/dev/null/x.json"), "--out /dev/null/x.json: its directory cannot be made"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path, single: str, arguments: tuple[str, ...], message: str
) -> None:
    with OddServer() as server:
        given = [argument.replace("{odd}", server.url) for argument in arguments]
        done = fledge("bench", "serve", "--workload", single, *given, "--quiet", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert server.bodies == []
    assert [file.name for file in tmp_path.iterdir()] == ["single.jsonl"]


def test_a_server_with_a_key_says_so(tmp_path: Path, single: str) -> None:
    with Serving(make_service(api_keys=("right",))) as serving:
        asked = ("bench", "serve", "--url", f"x={serving.url}", "--workload", single, "--quiet", "--concurrency", "1")
        done = fledge(*asked, "--api-key", "wrong", cwd=tmp_path)
        assert done.returncode == 2
        assert "see --api-key" in done.stderr
        done, results = bench(tmp_path, *asked[2:], "--requests", "2", "--repeats", "1", "--api-key", "x=right")
    assert done.returncode == 0, done.stderr
    assert results.status == "complete"
