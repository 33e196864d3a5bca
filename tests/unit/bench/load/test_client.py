"""One request against servers that behave well, oddly and badly."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fledge.bench.load.client import StreamedAnswer, StreamError, ask
from fledge.bench.load.http import HttpClient
from tests.odd_server import HEAD, OddServer, Script, event, good, piece, usage

BODY = {"max_tokens": 4}


def asked(script: Script, *, stall: float = 5.0) -> StreamedAnswer:
    async def run(url: str) -> StreamedAnswer:
        client = HttpClient(url=url)
        answer = await ask(client, "v1/chat/completions", BODY, stall_seconds=stall, max_pieces=50)
        client.close()
        return answer

    with OddServer(script) as server:
        return asyncio.run(run(server.url))


def sends(*parts: bytes) -> Script:
    async def script(_server: OddServer, _number: int, _body: dict[str, Any]) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return script


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return CHUNKED + b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def test_a_good_answer() -> None:
    answer = asked(good)
    assert answer.error is None
    assert (answer.output_tokens, answer.record("a", 0.0).prompt_tokens, answer.pieces) == (4, 5, 4)
    assert "".join(answer.text) == "0 1 2 3 "
    assert not answer.counted
    assert answer.first_token is not None
    assert answer.done is not None
    assert answer.sent < answer.first_token <= answer.done


def test_the_first_token_is_the_first_text_and_the_end_is_the_finish() -> None:
    async def script(*_: object) -> AsyncIterator[bytes]:
        yield HEAD + event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.3)
        yield piece("a")
        await asyncio.sleep(0.3)
        yield piece("b", "stop")
        await asyncio.sleep(0.3)
        yield usage(2) + event(b"[DONE]")

    answer = asked(script)
    now = time.perf_counter()
    assert answer.first_token is not None
    assert answer.done is not None
    # The reader may be late, on a busy machine by many milliseconds: then the end comes that much sooner after it.
    assert answer.sent + 0.3 <= answer.first_token <= answer.done - 0.05
    assert answer.done <= now - 0.05


def test_chunked_bodies_comments_and_events_cut_anywhere() -> None:
    text = b": hello\r\n\r\n" + piece("\u00e9") + piece("b", "stop") + usage(7) + event(b"[DONE]")
    cuts = [text[i : i + 5] for i in range(0, len(text), 5)]
    answer = asked(sends(*(chunked(*cuts)[i : i + 11] for i in range(0, len(chunked(*cuts)), 11))))
    assert answer.error is None
    assert "".join(answer.text) == "\u00e9b"
    assert answer.output_tokens == 7  # speculation: several tokens in a piece


def test_other_shapes_of_text_count_too() -> None:
    parts = [
        {"delta": {"reasoning_content": "r"}},
        {"delta": {"tool_calls": [{"function": {"name": "f", "arguments": None}}]}},
        {"text": "t", "finish_reason": "stop"},
    ]
    answer = asked(sends(HEAD, *(event({"choices": [part]}) for part in parts), usage(3)))
    assert (answer.error, "".join(answer.text), answer.pieces) == (None, "rft", 3)


def test_halves_of_a_character_are_the_character() -> None:
    whole, halves, half = (
        StreamedAnswer(sent=0.0, text=text).record("a", 0.0).digest
        for text in (["\U0001f600"], ["\ud83d", "\ude00"], ["\ud83d"])
    )
    assert whole == halves
    assert half != whole


@pytest.mark.parametrize("calls", [5, "text", {"a": 1}, [5, None]])
def test_tool_calls_that_are_none_are_no_text(calls: object) -> None:
    answer = StreamedAnswer(sent=0.0)
    answer.read(json.dumps({"choices": [{"delta": {"tool_calls": calls, "content": "x"}}]}), 1.0)
    assert answer.text == ["x"]


def test_json_that_is_too_deep_is_malformed() -> None:
    with pytest.raises(StreamError, match="malformed JSON"):
        StreamedAnswer(sent=0.0).read("[" * 100_000, 1.0)


def test_a_report_of_infinitely_many_rounds_says_nothing() -> None:
    report = {"rounds": float("inf"), "accepted_by_depth": [], "drafted_by_depth": []}
    assert StreamedAnswer(sent=0.0, usage={"speculation": report}).record("a", 0.0).acceptance == ()


def test_a_report_tells_rounds_outside_repetition_and_copies() -> None:
    fresh = {"rounds": 2, "accepted_by_depth": [1], "drafted_by_depth": [2]}
    report = {"rounds": 5, "accepted_by_depth": [4], "drafted_by_depth": [5], "outside_repetition": fresh}
    report |= {"novel": {"rounds": 1, "accepted_by_depth": [0], "drafted_by_depth": [1]}, "copied_tokens": 3}
    record = StreamedAnswer(sent=0.0, usage={"speculation": {**report, "repeated_tokens": 7}}).record("a", 0.0)
    assert record.acceptance == ((1, 0, 1), (1, 1, 4))
    assert record.fresh_acceptance == ((1, 0, 1), (1, 1, 1))
    assert record.novel_acceptance == ((1, 0, 1),)
    assert (record.repeated_tokens, record.copied_tokens) == (7, 3)
    for odd in (5, "x", [1], {"outside_repetition": 3, "novel": None, "repeated_tokens": "many", "copied_tokens": 0.5}):
        record = StreamedAnswer(sent=0.0, usage={"speculation": odd}).record("a", 0.0)
        assert (record.acceptance, record.fresh_acceptance, record.novel_acceptance) == ((), (), ())
        assert (record.repeated_tokens, record.copied_tokens) == (None, None)


def test_without_usage_pieces_are_counted_and_labelled() -> None:
    answer = asked(sends(HEAD, piece(), piece(), piece("c", "length"), event(b"[DONE]")))
    assert answer.error is None
    assert answer.counted
    assert answer.output_tokens == 3


def test_an_answer_of_one_token_without_text_is_an_answer() -> None:
    answer = asked(sends(HEAD, event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), usage(1)))
    assert answer.error is None
    assert answer.output_tokens == 1
    assert answer.first_token == answer.done


def refusal(status: str, body: str, *more: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more, "", ""])
    return (head + body).encode()


@pytest.mark.parametrize(
    ("parts", "message", "failure"),
    [
        ([HEAD, piece(), b'data: {"choi\n\n'], 'malformed JSON in the stream: {"choi', "other"),
        ([HEAD, event(b"3")], "no JSON object", "other"),
        ([HEAD, event({"choices": "x"})], "no list of choices", "other"),
        (
            [HEAD, piece(), event({"error": {"message": "out of\nmemory", "code": 500}})],
            "error in the stream: out of memory",
            "other",
        ),
        ([HEAD, piece(), piece()], "ended without a finish reason, after 2 pieces", "other"),
        ([HEAD, event(b"[DONE]")], "ended without a finish reason", "other"),
        ([HEAD, piece("", "stop"), usage(0)], "without a single token", "other"),
        ([HEAD, piece("", "stop")], "without a single token", "other"),
        ([HEAD, *[piece()] * 8, piece("", "stop"), usage(2)], "usage tells 2 tokens, but 8 pieces", "other"),
        ([HEAD, piece("a", "abort"), usage(1)], "gave up: finish reason 'abort'", "other"),
        ([HEAD, *[piece()] * 60], "does not end", "other"),
        (
            [refusal("429 Too Many", '{"error": {"message": "slow down"}}', "Retry-After: 7")],
            "HTTP 429, Retry-After 7: slow down",
            "other",
        ),
        ([refusal("400 Bad", '{"detail": "no such field"}')], "HTTP 400: no such field", "other"),
        ([refusal("500 Oops", "<html>" + "x" * 999)], "HTTP 500: <html>xxx", "other"),
        ([refusal("307 Elsewhere", "", "Location: /x")], "HTTP 307", "other"),
        (
            [refusal("200 OK", '{"choices": []}', "Content-Type: application/json")],
            "without a stream of events",
            "other",
        ),
        ([chunked(piece())[:-5]], "connection lost after 1 pieces", "connection"),
        ([b""], "connection lost after 0 pieces", "connection"),
        ([b"SSH-2.0-x\r\n\r\n"], "no HTTP", "connection"),
        ([CHUNKED + b"zz\r\n"], "no length", "connection"),
        ([CHUNKED + b"fffffffff\r\n"], "a chunk of", "connection"),
        ([b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"], "compressed", "connection"),
    ],
)
def test_what_goes_wrong_is_one_line(parts: list[bytes], message: str, failure: str) -> None:
    answer = asked(sends(*parts))
    assert answer.error is not None
    assert message in answer.error
    assert "\n" not in answer.error
    assert len(answer.error) < 300
    assert answer.failure == failure


@pytest.mark.parametrize("endless", [b"", b": still here\n\n"])
def test_a_stall_ends_even_if_comments_keep_coming(endless: bytes) -> None:
    async def script(*_: object) -> AsyncIterator[bytes]:
        yield HEAD + piece()
        while True:
            await asyncio.sleep(0.05)
            yield endless

    answer = asked(script, stall=0.4)
    assert (answer.error, answer.failure) == ("stalled: nothing for 0.4 s, after 1 pieces of text", "stall")


def test_a_slow_answer_is_no_stall() -> None:
    async def script(*_: object) -> AsyncIterator[bytes]:
        yield HEAD
        for _i in range(6):
            await asyncio.sleep(0.25)
            yield piece()
        yield piece("", "stop") + usage(6)

    assert asked(script, stall=1.0).error is None


def test_nobody_there() -> None:
    client = HttpClient(url="http://127.0.0.1:9")
    answer = asyncio.run(ask(client, "v1/x", BODY, stall_seconds=1, max_pieces=5))
    assert answer.failure == "connection"
    assert (answer.error or "").startswith("no connection: ")


def test_connections_are_used_again_and_a_closed_one_is_noticed() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):  # then this server closes without a word
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            assert json.loads(await reader.readexactly(length)) == BODY
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(piece("a", "stop"), usage(1)))
        writer.close()

    async def run() -> list[str | None]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        errors = []
        for _ in range(5):
            errors.append((await ask(client, "v1/x", BODY, stall_seconds=5, max_pieces=5)).error)
            await asyncio.sleep(0.05)
        client.close()
        server.close()
        return errors

    assert asyncio.run(run()) == [None] * 5
    assert connections == 3


def test_credentials_in_the_address_become_a_header() -> None:
    with OddServer() as server:
        url = server.url.replace("://", "://me:p%40ss@")
        asyncio.run(ask(HttpClient(url=url), "v1/completions", BODY, stall_seconds=5, max_pieces=50))
    assert b"Authorization: Basic bWU6cEBzcw==\r\n" in server.headers[0]
    assert b"me:p" not in server.headers[0]
