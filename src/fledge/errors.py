"""Errors a user can act on. The command line prints their message as one line and exits with status 2."""

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

_T = TypeVar("_T")


class FledgeError(Exception):
    """Base class. The message is one line: what is wrong, where, and what to do about it."""


class ConfigError(FledgeError, ValueError):
    """A setting is unknown, out of range, or contradicts another one. `param` is its name, if known.

    Also a ValueError, because callers of vLLM's `LLM` and `SamplingParams` catch that.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeedsVllmError(ConfigError):
    """Only vLLM supports this feature, which the message names. The caller adds which option selects vLLM."""


class CheckpointError(FledgeError):
    """A model directory cannot be read, or its files contradict each other."""


class CheckpointWarning(UserWarning):
    """A checkpoint works, but probably not as its author intended. The command line prints it as one line."""


class SwapRefusedError(FledgeError):
    """A drafter cannot replace the one that is served, although its checkpoint may be valid for another setup."""


class DataError(FledgeError):
    """Data (conversations, workloads, stored examples) cannot be read, or does not have the expected content."""


class PromptError(FledgeError):
    """A request cannot be served: empty, too long, or not expressible with this tokenizer."""


class ContextLengthError(PromptError):
    """A prompt, or a prompt plus its requested output, is longer than the model or the KV cache allows."""


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or the list of known names if none is close."""
    candidates = sorted(known)
    close = get_close_matches(name, candidates, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known names: {', '.join(candidates)}."


def refuses_unknown_names(what: str) -> Callable[[type[_T]], type[_T]]:
    """Class decorator: an unknown keyword argument raises ConfigError with the closest known name, not TypeError."""

    def decorate(cls: type[_T]) -> type[_T]:
        original = cls.__init__
        known = [name for name in inspect.signature(original).parameters if name != "self"]

        @functools.wraps(original)
        def checked(self: _T, *args: object, **named: object) -> None:
            for name in named:
                if name not in known:
                    raise ConfigError(f"unknown {what} '{name}'.{nearest_name_hint(name, known)}")
            original(self, *args, **named)

        setattr(cls, "__init__", checked)  # noqa: B010 - mypy forbids plain assignment to a method
        return cls

    return decorate
