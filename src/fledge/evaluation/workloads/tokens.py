"""Prompts as token ids, kept in the user's cache: tokenising a long workload takes longer than reading it back."""

import contextlib
import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import transformers

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import tokenizer_digests
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import PromptError
from fledge.evaluation.conversations import split_turns
from fledge.evaluation.workloads.base import Workload
from fledge.files import atomic_path, cache_directory

FORMAT = 1

TokenIds = tuple[tuple[int, ...], ...]


def tokenised(workload: Workload, target: str | Path, cache_dir: Path | None = None) -> TokenIds:
    """Return the ids of every prompt through the target's chat template: of its first turn, where later ones wait for
    answers.

    A cache that is missing, damaged or cannot be written costs time and nothing else.
    """
    directory = resolve(target)
    path = (cache_dir or cache_directory()) / "tokens" / f"{_key(workload, directory)}.npz"
    kept = _read(path, len(workload.prompts))
    if kept is not None:
        return kept
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise PromptError(f"{target}: has no tokenizer, which workloads of chat messages need")
    ids = tuple(tuple(encode_chat(tokenizer, prompt.first_messages)) for prompt in workload.prompts)
    _write(path, ids)
    return ids


def with_token_ids(workload: Workload, target: str | Path, cache_dir: Path | None = None) -> Workload:
    """Return the workload with `token_ids` of its first turns, but for prompts that bring answers of their own."""
    ids = tokenised(workload, target, cache_dir)
    prompts = [
        replace(prompt, token_ids=own) if prompt.first_messages in split_turns(prompt.messages)[:1] else prompt
        for prompt, own in zip(workload.prompts, ids, strict=True)
    ]
    return replace(workload, prompts=tuple(prompts))


def _key(workload: Workload, directory: Path) -> str:
    """What the ids follow from: the prompts, the tokenizer's files and template, and who renders it."""
    parts = (FORMAT, workload.digest, *sorted(tokenizer_digests(directory).items()), transformers.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(path: Path, prompts: int) -> TokenIds | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens, lengths = arrays["tokens"], arrays["lengths"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if tokens.ndim != 1 or lengths.shape != (prompts,) or lengths.min(initial=0) < 0 or lengths.sum() != len(tokens):
        return None
    return tuple(tuple(part.tolist()) for part in np.split(tokens, np.cumsum(lengths)[:-1]))


def _write(path: Path, ids: Sequence[Sequence[int]]) -> None:
    """Whole or not at all, also where several processes write. A cache that cannot be written is none."""
    tokens = np.concatenate([np.asarray(one, dtype=np.int32) for one in ids])
    lengths = np.array([len(one) for one in ids], dtype=np.int64)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            np.savez_compressed(temporary, tokens=tokens, lengths=lengths)
