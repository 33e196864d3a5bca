"""`fledge bench serve`: OpenAI-compatible servers under load, side by side."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.cli.command import numbers, options, run_bench, settings_of
from fledge.errors import ConfigError
from fledge.files import parse_json

if TYPE_CHECKING:
    from fledge.bench.load.servers import ServerSpec


@options("bench serve")
def serve(
    *,
    url: list[str],
    model: list[str] | None = None,
    baseline: str | None = None,
    workload: list[str] | None = None,
    sample: int | None = None,
    concurrency: str | None = None,
    rate: str | None = None,
    requests: int | None = None,
    repeats: int = 3,
    warmup: int | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    timeout: float = 120,
    endpoint: str = "chat",
    api_key: list[str] | None = None,
    header: list[str] | None = None,
    extra_body: list[str] | None = None,
    out: Path | None = None,
    fail_on_errors: bool = True,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Load OpenAI-compatible servers in turns, and compare them.

    Every request is streamed and timed. A server that fails is labelled, has no ratio, and makes the exit status 1.
    Prefix caches work as the servers have them: switch them off there to measure the reading of prompts.
    """
    if endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint: found '{endpoint}', allowed is chat or completions")

    from fledge.bench.load.run import ServeRun, ServeSettings  # noqa: PLC0415 - `fledge --help` must stay quick
    from fledge.evaluation.results import Load  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415
    from fledge.provenance import run_provenance, shown_command  # noqa: PLC0415

    if concurrency is None and rate is None:
        concurrency = "1,4,16,64"
    many = [] if concurrency is None else numbers("concurrency", concurrency, int, 1, 4096)
    rates = [] if rate is None else numbers("rate", rate, float, 1e-5, 1e5)
    settings = settings_of(
        ServeSettings,
        locals(),
        servers=_servers(url, models=model or (), keys=api_key or (), headers=header or (), extras=extra_body or ()),
        workloads=load_workloads(workload or ["mt_bench"], sample=sample, seed=seed or 0, whole_groups=True),
        loads=tuple(dict.fromkeys([*(Load(concurrency=one) for one in many), *(Load(rate=one) for one in rates)])),
    )
    command = {"command": shown_command(_without_secrets(sys.argv)), "about": "the load generator and its machine"}
    provenance = {**run_provenance(), **command}
    run = ServeRun(settings=settings, provenance=provenance, out=out, progress=Progress(quiet=quiet))
    run_bench(run, fail_on_errors=fail_on_errors, as_json=as_json)


def _servers(
    urls: Sequence[str],
    *,
    models: Sequence[str],
    keys: Sequence[str],
    headers: Sequence[str],
    extras: Sequence[str],
) -> tuple["ServerSpec", ...]:
    from fledge.bench.load.servers import ServerSpec, parse_url  # noqa: PLC0415

    parsed = [parse_url(text) for text in urls]
    names = [name or url.partition("://")[2].rpartition("@")[2] for name, url in parsed]
    model, key = _by_server(models, names), _by_server(keys, names)
    bodies: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in extras:
        given, _, value = text.partition("=") if not text.lstrip().startswith("{") else ("", "", text)
        if given and given not in names:
            raise ConfigError(f"--extra-body {text}: no server is called '{given}'; expected JSON, or NAME=JSON")
        try:
            for name in [given] if given else names:
                bodies[name].update(**parse_json(value))
        except (ValueError, TypeError):
            raise ConfigError(f"--extra-body: found {value!r}, expected a JSON object") from None
    common: dict[str, str] = {}
    for text in headers:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or not text.isascii() or not text.isprintable():
            raise ConfigError("--header: expected NAME:VALUE")
        common[name.strip()] = value.strip()
    usual = os.environ.get("OPENAI_API_KEY")
    return tuple(
        ServerSpec(
            name=n, url=url, model=model.get(n), api_key=key.get(n) or usual, headers=common, extra_body=bodies[n]
        )
        for n, (_, url) in zip(names, parsed, strict=True)
    )


def _by_server(values: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Read values that are for all servers, or as NAME=VALUE for one."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if equals and name in names:
            found[name] = rest
        else:
            found = {**dict.fromkeys(names, value), **found}
    return found


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line as others may see it: no keys, no headers, no passwords in addresses."""
    text = re.sub(r"(?<=://)[^/@\0]*@", "", "\0".join(arguments))
    return re.sub(r"(?<=\0)(--api-key|--header)([=\0])[^\0]*", r"\1\2...", text).split("\0")
