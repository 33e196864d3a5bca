"""`fledge bench serve`: OpenAI-compatible servers under load, side by side."""

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli.bench.options import (
    AsJson,
    IgnoreEos,
    MaxTokens,
    Out,
    Quiet,
    Repeats,
    Sample,
    Temperature,
    Workloads,
    integers,
    results_file,
    run_and_print,
)
from fledge.errors import ConfigError

if TYPE_CHECKING:
    from fledge.bench.load.servers import ServerSpec
    from fledge.evaluation.results import Load

SECRETS = ("--api-key", "--header")


def serve(
    *,
    url: Annotated[
        list[str], typer.Option(metavar="[NAME=]URL", help="A server, such as ours=http://127.0.0.1:8000. Repeat it.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]MODEL", help="Model to ask for. Default: the first that each server names."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Server that ratios are taken to. Default: the first.")] = None,
    workload: Workloads = None,
    sample: Sample = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests in flight at all times, comma-separated. 1,4,16,64 without --rate.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second that arrive at random, comma-separated.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts per cell. Default: 4 for each in flight, 20 s of a rate; at least 16."),
    ] = None,
    repeats: Repeats = 3,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Prompts that are not measured, before each load. Default: as many as are in flight."),
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Of samples and arrival times; if given, also sent with every request.")
    ] = None,
    ignore_eos: IgnoreEos = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without an event until a request is given up.")
    ] = 120,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]KEY", help="Key to send. Or OPENAI_API_KEY.")
    ] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME:VALUE", help="HTTP header to send.")] = None,
    extra_body: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]JSON", help="More fields for every request, or for those to one server."),
    ] = None,
    out: Out = None,
    fail_on_errors: Annotated[bool, typer.Option(help="Exit with 1 if any request failed.")] = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Load OpenAI-compatible servers (ours, vLLM, SGLang) with the same prompts, in turns, and compare them.

    Every request is streamed and timed. A server that fails is labelled, has no ratio, and makes the exit status 1.
    Prefix caches work as the servers have them: switch them off there to measure the reading of prompts.
    """
    if endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint: found '{endpoint}', allowed is chat or completions")

    from fledge.bench.load.run import ServeRun, ServeSettings  # noqa: PLC0415 - `fledge --help` must stay quick
    from fledge.evaluation.workloads import distinct_workloads, load_workload  # noqa: PLC0415
    from fledge.progress import Progress  # noqa: PLC0415
    from fledge.provenance import run_provenance, shown_command  # noqa: PLC0415

    settings = ServeSettings(
        servers=_servers(url, model or (), api_key or (), header or (), extra_body or ()),
        workloads=distinct_workloads(
            load_workload(name, sample=sample, seed=seed or 0) for name in workload or ("mt_bench",)
        ),
        loads=_loads(concurrency, rate),
        baseline=baseline,
        requests=requests,
        repeats=repeats,
        warmup=warmup,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        stall_seconds=timeout,
        endpoint="chat" if endpoint == "chat" else "completions",
        facts={"sample": sample},
    )
    command = shown_command(_without_secrets(sys.argv))
    run = ServeRun(
        settings=settings,
        provenance={**run_provenance(), "command": command, "about": "the load generator and its machine"},
        out=results_file(out, "serve"),
        progress=Progress(quiet=quiet),
    )
    run_and_print(run, as_json=as_json, quiet=quiet, fail_on_errors=fail_on_errors)


def _servers(
    urls: Sequence[str], models: Sequence[str], keys: Sequence[str], headers: Sequence[str], extras: Sequence[str]
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
        for name in [given] if given else names:
            bodies[name] |= _json_object(value)
    common = dict(_header(text) for text in headers)
    return tuple(
        ServerSpec(
            name=name,
            url=url,
            model=model.get(name),
            api_key=key.get(name) or os.environ.get("OPENAI_API_KEY"),
            headers=common,
            extra_body=bodies[name],
        )
        for name, (_, url) in zip(names, parsed, strict=True)
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


def _json_object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text).items())
    except (ValueError, AttributeError):
        raise ConfigError(f"--extra-body: found {text!r}, expected a JSON object") from None


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isascii() or not text.isprintable():
        raise ConfigError("--header: expected NAME:VALUE")
    return name.strip(), value.strip()


def _loads(concurrency: str | None, rate: str | None) -> tuple["Load", ...]:
    from fledge.evaluation.results import Load  # noqa: PLC0415

    if concurrency is None and rate is None:
        concurrency = "1,4,16,64"
    loads = [] if concurrency is None else [Load(concurrency=n) for n in integers("concurrency", concurrency, 1, 4096)]
    for part in rate.split(",") if rate is not None else ():
        try:
            loads.append(Load(rate=float(part)))
        except ValueError:
            loads.append(Load(rate=0.0))
        if not 0 < loads[-1].size <= 1e5:
            raise ConfigError(f"--rate: found '{part}', expected requests per second, above 0, with commas")
    return tuple(dict.fromkeys(loads))


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line as others may see it: no keys, no headers, no passwords in addresses."""
    shown: list[str] = []
    for i, argument in enumerate(arguments):
        option, equals, _ = argument.partition("=")
        if option in SECRETS and equals:
            shown.append(f"{option}=...")
        elif i and arguments[i - 1] in SECRETS:
            shown.append("...")
        else:
            shown.append(re.sub(r"(?<=://)[^/@]*@", "", argument))
    return shown
