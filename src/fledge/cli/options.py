"""Options that several verbs have, said once. Those of the engine are what `EngineConfig` says of them.

Importing this imports no torch: `--help` must be quick.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.errors import ConfigError

INTERRUPTED = 130  # exit status

_FIELDS = {one.name: one for one in fields(EngineConfig)}
_TYPES = get_type_hints(EngineConfig)


def token_count(text: str) -> int | None:
    """Read vLLM's ways to write a length: 4096, 4k (4000), 4K (4096), auto."""
    if text in ("auto", "-1"):
        return None
    factors = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
    number, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError):
        raise ConfigError(f"--max-model-len: found '{text}', expected a number, 4k or auto") from None


def _engine_option(name: str) -> Any:
    """The command-line option of a field of `EngineConfig`."""
    flags = {"kv_cache_bytes": ["--kv-cache-memory-bytes", "--kv-cache-bytes"], "enforce_eager": ["--enforce-eager"]}
    more: dict[str, Any] = {"parser": token_count, "metavar": "TOKENS"} if name == "max_model_len" else {}
    return typer.Option(*flags.get(name, ()), help=_FIELDS[name].metadata["help"], **more)


def engine_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of `EngineConfig`. It gets their values as one mapping, `engine`."""
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_FIELDS[name].default,
            annotation=Annotated[_TYPES[name], _engine_option(name)],
        )
        for name in names
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "engine"]

        @functools.wraps(command)
        def with_engine(**given: Any) -> None:
            engine = {name: given.pop(name) for name in names}
            command(**given, engine=engine)

        setattr(with_engine, "__signature__", signature.replace(parameters=[*own, *added]))  # noqa: B010
        return with_engine

    return decorate


def read_speculation(
    drafter: str | None, config: str | None, depth: int | None, tree: tuple[int, int] | None
) -> SpeculativeConfig | None:
    """Return vLLM's JSON `config`, or the options that stand for the usual parts of it, as a speculative config."""
    if config is not None:
        if drafter is not None or depth is not None or tree is not None:
            raise ConfigError("--speculative-config says it all; leave out --drafter, --depth and --tree")
        return SpeculativeConfig.from_json(config)
    if drafter is None:
        if depth is not None or tree is not None:
            raise ConfigError("--depth and --tree need a --drafter")
        return None
    values: dict[str, Any] = {"model": drafter}
    if depth is not None:
        values["num_speculative_tokens"] = depth
    if tree is not None:
        values |= {"tree_width": tree[0], "tree_budget": tree[1]}
    return SpeculativeConfig.from_dict(values)
