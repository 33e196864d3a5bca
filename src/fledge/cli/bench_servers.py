"""The servers that `fledge bench serve` loads, from its options."""

import os
import re
from collections.abc import Sequence
from typing import Any

from fledge.bench.load.servers import ServerSpec, parse_url
from fledge.errors import ConfigError
from fledge.files import parse_json


def read_servers(
    urls: Sequence[str],
    *,
    models: Sequence[str],
    keys: Sequence[str],
    headers: Sequence[str],
    extras: Sequence[str],
) -> tuple[ServerSpec, ...]:
    """Return name, URL and request options of each server. Raises ConfigError."""
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
    """Return server -> value, from values for all servers and NAME=VALUE for one."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if equals and name in names:
            found[name] = rest
        else:
            found = {**dict.fromkeys(names, value), **found}
    return found


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command line without keys, headers and passwords in URLs."""
    text = re.sub(r"(?<=://)[^/@\0]*@", "", "\0".join(arguments))
    return re.sub(r"(?<=\0)(--api-key|--header)([=\0])[^\0]*", r"\1\2...", text).split("\0")
