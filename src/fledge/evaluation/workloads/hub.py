"""Prompts from a dataset on the Hugging Face hub: `hf:OWNER/NAME`, or `hf:OWNER/NAME:FILE` (wildcards allowed)."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from fledge.errors import ConfigError, DataError
from fledge.evaluation.workloads.formats import SUFFIXES

PREFIX = "hf:"
_SOURCE = re.compile(r"hf:(?P<repo>[\w][\w.\-]*/[\w][\w.\-]*)(:(?P<file>.+))?")
_SHOWN = 6
_WILD = re.compile(r"[*?\[]")


def fetch(source: str) -> Path:
    """Return the local copy of a dataset's file, fetched if need be. Any failure is a DataError of one line."""
    matched = _SOURCE.fullmatch(source)
    if matched is None:
        raise ConfigError(f"workload {source}: expected hf:OWNER/NAME or hf:OWNER/NAME:FILE")
    repo, wanted = matched["repo"], matched["file"]
    try:
        with _quiet():
            if wanted is None or _WILD.search(wanted):
                listed = huggingface_hub.HfApi().list_repo_files(repo, repo_type="dataset")
                wanted = _chosen(source, listed, wanted)
            return Path(huggingface_hub.hf_hub_download(repo, wanted, repo_type="dataset"))
    except DataError:
        raise
    except GatedRepoError:
        raise DataError(f"{source}: the dataset is gated; accept its terms on its page and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise DataError(f"{source}: no such dataset on the hub (private ones need HF_TOKEN)") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise DataError(f"{source}: not in the local Hugging Face cache, and the hub cannot be reached") from None
    except EntryNotFoundError:
        raise DataError(f"{source}: the dataset has no file '{wanted}'") from None
    except Exception as error:  # The hub client leaks its HTTP library's errors, whichever that is today.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{source}: fetching it from the hub failed: {lines[0]}; or give a file that you have fetched yourself"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """The client logs every attempt; what came of them is said once."""
    before = huggingface_hub.logging.get_verbosity()
    huggingface_hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        huggingface_hub.logging.set_verbosity(before)


def _chosen(source: str, files: Sequence[str], pattern: str | None) -> str:
    """The one file that is meant: of all that can be read, those of a test split before others."""
    found = [name for name in files if name.endswith(SUFFIXES) and "/." not in f"/{name}"]
    if pattern is not None:
        found = fnmatch.filter(found, pattern)
    tests = [name for name in found if "test" in Path(name).name]
    found = tests or found
    if len(found) == 1:
        return found[0]
    if not found:
        shown = f" matching '{pattern}'" if pattern else f" to read ({', '.join(SUFFIXES)})"
        raise DataError(f"{source}: the dataset has no file{shown}")
    names = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise DataError(f"{source}: the dataset has {len(found)} such files, name one as hf:OWNER/NAME:FILE: {names}")
