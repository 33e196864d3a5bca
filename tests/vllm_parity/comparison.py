"""Two servers' answers to one request, field by field: status, headers, keys, types and values.

How a stream is divided into chunks is the server's own affair: compared is what it adds up to, what its chunks are made
of, and how it begins and ends.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import httpx
import yaml

from tests.vllm_parity.request_cases import CLIENTS_ID, RequestCase

TOLERANCE = 2e-3  # of log-probabilities: two implementations in float32
HEADERS = ("content-type", "x-request-id", "allow")
OPAQUE = ("id", "x-request-id", "created", "message")  # their own: an identity, a time, the wording of an error
PREFIXES = ("chatcmpl-", "cmpl-")  # of identities
DONE = "[DONE]"
Change = Literal["absent", "added", "other"]  # in Fledge's answer, seen from vLLM's; null is nothing


@dataclass(frozen=True)
class Difference:
    """`field` is a path without numbers, as `choices[].message.content`."""

    field: str
    here: Change
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.field} ({self.here}): {self.ours!r:.200} here, {self.theirs!r:.200} in vLLM"


@dataclass(frozen=True, kw_only=True)
class Meant:
    """A difference that is meant. `field` is a pattern, `requests` has patterns of names."""

    field: str
    here: Change
    why: str
    requests: str = "*"

    def explains(self, case: RequestCase, found: Difference) -> bool:
        if found.here != self.here or not any(fnmatchcase(case.name, one) for one in self.requests.split()):
            return False
        return fnmatchcase(found.field, self.field.replace("[]", "[[]]"))


def read_meant(table: str) -> list[Meant]:
    """Return what tools/vllm-differences.yaml says, where an entry may name several fields."""
    entries: list[dict[str, Any]] = yaml.safe_load(table)
    return [Meant(**{**entry, "field": field}) for entry in entries for field in entry["field"].split()]


def ask(client: httpx.Client, case: RequestCase) -> dict[str, Any]:
    """Send a request and return what can be compared of the answer."""
    content = case.body if isinstance(case.body, bytes) else None if case.body is None else json.dumps(case.body)
    headers = {"Content-Type": "application/json", **case.headers} if content is not None else case.headers
    reply = client.request(case.method, case.path, content=content, headers=headers)
    is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
    body = {"stream": folded(reply.text)} if is_stream else reply.json() if reply.content else None
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        body["error"]["param"] = _field_at_fault(body["error"].get("param"))
    told = {name: reply.headers[name] for name in HEADERS if name in reply.headers}
    return {"status": reply.status_code, "headers": told, "body": body}


def _field_at_fault(param: str | None) -> str | None:
    """Return the field of the request; where in it is told in the servers' own ways."""
    return param and re.split(r"[.\[]", param.removeprefix("body."))[0]


# Streams


def folded(text: str) -> dict[str, Any]:
    """Return what a stream adds up to."""
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    chunks: list[dict[str, Any]] = [json.loads(one) for one in events if one != DONE]
    shape: dict[str, Any] = {}
    answers: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        _add_shape(shape, chunk)
        for choice in chunk.get("choices", ()):
            answer = answers.setdefault(choice["index"], {"goes_on_after_its_end": False, "chunk": {}, "delta": {}})
            answer["goes_on_after_its_end"] |= answer.get("finish_reason") is not None
            _add_choice(answer, choice)
    usages = [chunk.get("usage") for chunk in chunks if chunk.get("choices")]
    counts = [one["completion_tokens"] for one in usages if one]
    first = {name: value for name, value in chunks[0].items() if name not in ("choices", "usage")}
    return {
        "ends_with_done": events[-1] == DONE and events.count(DONE) == 1,
        "first": first,
        "chunk": shape,
        "errors": [chunk["error"] for chunk in chunks if "error" in chunk],
        "usage": {
            "in_each_chunk": bool(usages) and all(usages),
            "first": usages[0] if usages else None,
            "never_less": counts == sorted(counts),
            "in_a_chunk_of_its_own": chunks[-1].get("choices") == [],
            "last": chunks[-1].get("usage"),
        },
        "choices": [answers[index] for index in sorted(answers)],
    }


def _add_shape(shape: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Note the type of each field: null only if it is never anything else."""
    for name, value in part.items():
        if value is not None or name not in shape:
            shape[name] = None if value is None else type(value).__name__


def _add_choice(answer: dict[str, Any], choice: Mapping[str, Any]) -> None:
    """Add one entry of a chunk's `choices` to the answer so far."""
    delta = choice.get("delta") or {}
    _add_shape(answer["chunk"], choice)
    _add_shape(answer["delta"], delta)
    for name in ("finish_reason", "stop_reason"):
        if choice.get(name) is not None:
            answer[name] = choice[name]
    _extend(answer, choice, ("text", "token_ids", "prompt_token_ids"))
    _extend(answer, delta, ("role", "content", "reasoning"))
    if choice.get("logprobs"):
        _extend(answer.setdefault("logprobs", {}), choice["logprobs"], tuple(choice["logprobs"]))
    for part in delta.get("tool_calls") or ():
        calls = answer.setdefault("tool_calls", [])
        while len(calls) <= part["index"]:
            calls.append({})
        calls[part["index"]] |= {name: part[name] for name in ("id", "type") if part.get(name) is not None}
        _extend(calls[part["index"]], part.get("function") or {}, ("name", "arguments"))


def _extend(kept: dict[str, Any], part: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if part.get(name) is not None:
            kept[name] = kept[name] + part[name] if name in kept else part[name]


# Comparison


def compare(case: RequestCase, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two answers. If one is an error and the other none, that is all there is to say."""
    if ours["status"] != theirs["status"]:
        return [Difference("status", "other", _said(ours), _said(theirs))]
    headers = differences(case, ours["headers"], theirs["headers"], "headers")
    return [*headers, *differences(case, ours["body"], theirs["body"])]


def _said(answer: Mapping[str, Any]) -> str:
    body = answer["body"] if isinstance(answer["body"], dict) else {}
    return f"{answer['status']} {body.get('error', {}).get('message', '')}".strip()


def differences(case: RequestCase, ours: Any, theirs: Any, field: str = "") -> Iterator[Difference]:
    """Yield what differs between two values, however deep."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if case.is_drawn and field.endswith(".top_logprobs[]") and "token" not in theirs:
            return  # its keys are tokens
        for name in {**theirs, **ours}:
            path = f"{field}.{name}" if field else name
            if name in ours and name in theirs:
                yield from differences(case, ours[name], theirs[name], path)
            else:
                change: Change = "added" if name in ours else "absent"
                yield Difference(path, change, ours.get(name), theirs.get(name))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for our, their in zip(ours, theirs, strict=True):
            yield from differences(case, our, their, f"{field}[]")
    elif not _alike(case, field.rpartition(".")[2], ours, theirs):
        yield Difference(
            field or "body", "absent" if ours is None else "added" if theirs is None else "other", ours, theirs
        )


def _parsed(arguments: str) -> Any:
    """Of a tool call: JSON, in which blanks mean nothing, unless it was cut short."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _alike(case: RequestCase, name: str, ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, float):  # perhaps a logprob, under a token that reads as the name of a field
        return case.is_drawn or math.isclose(ours, theirs, abs_tol=TOLERANCE)
    if name in OPAQUE:
        if isinstance(theirs, str) and CLIENTS_ID in theirs:
            return bool(ours == theirs)
        return name != "id" or ours.startswith(next((one for one in PREFIXES if theirs.startswith(one)), ""))
    if name == "arguments":
        ours, theirs = _parsed(ours), _parsed(theirs)
    return case.is_drawn or bool(ours == theirs)
