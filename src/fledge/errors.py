"""Errors a user can act on. The command line prints their message as one line and exits with status 2."""

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

_T = TypeVar("_T")


class FledgeError(Exception):
    """Base class: the message says what is wrong, where, and what to do about it, on one line."""


class ConfigError(FledgeError, ValueError):
    """A setting is unknown, out of range, or contradicts another one. `param` names it, where that is known.

    A ValueError too, which is what callers of vLLM's `LLM` and `SamplingParams` catch.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeedsVllmError(ConfigError):
    """Only vLLM can do this. The message says what; whoever knows how it was asked for says what to type instead."""


class CheckpointError(FledgeError):
    """A model directory cannot be read, or does not mean what its files say it means."""


class CheckpointWarning(UserWarning):
    """A checkpoint works, but probably not as well as its author meant. The command line prints it as one line."""


class SwapRefusedError(FledgeError):
    """A drafter may be good, but cannot take the place of the one that is served: here, or in what has been set up."""


class DataError(FledgeError):
    """Data (conversations, workloads, stored examples) cannot be read, or is not what it should be."""


class PromptError(FledgeError):
    """A request cannot be served: empty, too long, or not expressible with this tokenizer."""


class ContextLengthError(PromptError):
    """A prompt, or a prompt with the answer asked for, is longer than the model or the KV cache takes."""


def describe(error: BaseException) -> str:
    """Return an exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for a misspelt name, or the list of known names when nothing is near."""
    candidates = sorted(known)
    close = get_close_matches(name, candidates, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known names: {', '.join(candidates)}."


def refuses_unknown_names(what: str) -> Callable[[type[_T]], type[_T]]:
    """Class decorator: an unknown keyword raises ConfigError with the nearest known name, not TypeError."""

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
