"""The servers under load: what they are, found out before anything is measured."""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fledge.bench.load.client import SpeculationCounters, StreamedAnswer, read_metrics
from fledge.bench.load.http import HttpClient, HttpError, split_url
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.results import Contender

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "v1/chat/completions", "completions": "v1/completions"}
DEAD_AFTER = 3  # failures one after another, without an answer or a refusal between them
SETTLE_SECONDS = 2.0  # until a server has counted the last round


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """A server as the user names it."""

    name: str
    url: str  # without /v1, without a slash at the end
    model: str | None = None  # None: the one that the server names
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)


def parse_url(text: str) -> tuple[str | None, str]:
    """Read `URL` or `NAME=URL`; return the name, if any, and the address in front of `/v1`."""
    before, equals, after = text.partition("=")
    name, address = (before, after) if equals and "://" not in before else (None, text)
    try:
        split_url(address)
    except ValueError:
        raise ConfigError(f"--url {text}: expected an address such as http://127.0.0.1:8000, or NAME=ADDRESS") from None
    if name is not None and not name.strip():
        raise ConfigError(f"--url {text}: the name before '=' is empty")
    return name, address.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(kw_only=True)
class RemoteServer:
    """A server that answered, with a client of its own, to be closed; and whether it is still there."""

    spec: ServerSpec
    client: HttpClient
    model: str
    family: str  # "fledge", "vllm", "sglang", or whoever it says owns its models
    version: str = "unknown"
    has_counters: bool = False  # /metrics counts speculation
    dead: str | None = None  # why nothing more is sent to it
    _failures: int = 0  # one after another

    @property
    def reports(self) -> bool:
        """Each answer can carry its own acceptance."""
        return self.family == "fledge"

    def contender(self) -> Contender:
        url = split_url(self.spec.url)
        shown = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()  # without a password
        versions = {self.family: self.version}
        return Contender(name=self.spec.name, kind="server", target=self.model, url=shown, versions=versions)

    def body(self, messages: Sequence[Mapping[str, Any]], endpoint: Endpoint, options: Mapping[str, Any]) -> Any:
        """The JSON of a request; what the user adds comes last."""
        body: dict[str, Any] = {"model": self.model, **options}
        if endpoint == "chat":
            body["messages"] = list(messages)
        else:
            body["prompt"] = "\n\n".join(str(message["content"]) for message in messages)
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.spec.extra_body}
        if self.reports:
            body["speculation"] = {**(self.spec.extra_body.get("speculation") or {}), "report": True}
        return body

    async def counters(self) -> SpeculationCounters | None:
        """What /metrics counts, once the numbers have come to rest; None if it tells nothing now."""
        deadline = time.monotonic() + SETTLE_SECONDS
        known: SpeculationCounters | None = None
        while True:
            before, known = known, None
            with contextlib.suppress(HttpError):
                status, body = await self.client.get("metrics")
                known = read_metrics(body.decode("utf-8", errors="replace")) if status == 200 else None
            if known == before or time.monotonic() >= deadline:
                return known
            await asyncio.sleep(0.05)

    async def observe(self, answer: StreamedAnswer) -> None:
        """Count failures in a row; when there are enough, see whether anybody is there at all."""
        self._failures = self._failures + 1 if answer.failure in ("connection", "stall") else 0
        if self._failures < DEAD_AFTER or self.dead is not None:
            return
        if answer.failure == "connection":
            with contextlib.suppress(HttpError):
                if (await self.client.get("v1/models"))[0] < 500:
                    self._failures = 0
                    return
        self.dead = f"{DEAD_AFTER} failures in a row, the last: {answer.error}"


async def connect(spec: ServerSpec) -> RemoteServer:
    """Find out what is at an address. Raises ConfigError if it cannot be loaded with requests."""
    headers = {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
    client = HttpClient(url=spec.url, headers={**headers, **spec.headers})
    try:
        owners = {card["id"]: str(card.get("owned_by") or "") for card in await _models(client, spec)}
        if spec.model is None and not owners:
            raise ConfigError(f"--url {spec.url}: the server names no model; name it with --model")
        model = spec.model or next(iter(owners))
        if owners and model not in owners:
            raise ConfigError(f"--model {model}: not served at {spec.url}.{nearest_name_hint(model, owners)}")
        server = RemoteServer(spec=spec, client=client, model=model, family=owners.get(model) or "server")
        with contextlib.suppress(HttpError, ValueError, KeyError, TypeError):
            status, body = await client.get("version")
            if status == 200 and isinstance(version := json.loads(body)["version"], str):
                server.version = version
        server.has_counters = await server.counters() is not None
        return server
    except BaseException:
        client.close()
        raise


async def _models(client: HttpClient, spec: ServerSpec) -> list[dict[str, Any]]:
    try:
        status, body = await client.get("v1/models")
    except HttpError as error:
        raise ConfigError(f"--url {spec.url}: no server can be reached there: {error}") from None
    if status in (401, 403):
        raise ConfigError(f"--url {spec.url}: the server wants another key (HTTP {status}); see --api-key")
    if status == 404 and spec.model is not None:
        return []  # a server with the one endpoint that matters; errors of requests will tell if it has not
    with contextlib.suppress(ValueError, KeyError, TypeError):
        cards = json.loads(body)["data"]
        if status == 200 and all(isinstance(card["id"], str) for card in cards):
            return list(cards)
    raise ConfigError(f"--url {spec.url}: no OpenAI-compatible server: /v1/models answers HTTP {status} without models")
