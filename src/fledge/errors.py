"""Errors a user can act on. The command line prints their message as one line and exits with status 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class FledgeError(Exception):
    """Base class: the message says what is wrong, where, and what to do about it, on one line."""


class ConfigError(FledgeError):
    """A setting is unknown, out of range, or contradicts another one."""


class CheckpointError(FledgeError):
    """A model directory cannot be read, or does not mean what its files say it means."""


class PromptError(FledgeError):
    """A request cannot be served: empty, too long, or not expressible with this tokenizer."""


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for a misspelt name, or the list of known names when nothing is near."""
    candidates = sorted(known)
    close = get_close_matches(name, candidates, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known names: {', '.join(candidates)}."
