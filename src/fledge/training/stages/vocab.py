"""vocab: the draft vocabulary, the tokens that the training answers use most.

Writes vocab.json:
    target_ids     ascending; null for the target's whole vocabulary
    vocab_size     of the target
    data_digest    of the examples it was counted on: it is refused for others
    coverage       share of the answer tokens that are in it, and the same for other sizes
"""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import stop_ids, vocab_size
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import ConfigError, DataError
from fledge.files import read_json, write_text
from fledge.models.drafter.vocab import DraftVocabulary
from fledge.training.data.store import TokenStore
from fledge.training.pipeline import Stage, StageContext
from fledge.training.recipe import Recipe
from fledge.training.stages.prepare import text_identity
from fledge.training.stages.regenerate import examples_directory

VOCABULARY = "vocab.json"
_BLOCK = 1 << 24  # tokens counted at a time
_REPORTED_SIZES = tuple(1 << bits for bits in range(10, 18))


def settings(recipe: Recipe) -> dict[str, Any]:
    target = resolve(recipe.target.path)
    return {**asdict(recipe.vocab), "vocab_size": vocab_size(target), **text_identity(target)}


def run(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    target = resolve(recipe.target.path)
    full, tokenizer = vocab_size(target), load_tokenizer(target)
    store = TokenStore.open(examples_directory(context.inputs))
    answers, everything = np.zeros(full, dtype=np.int64), np.zeros(full, dtype=np.int64)
    for start in range(0, store.total_tokens, _BLOCK):
        tokens = store.tokens[start : start + _BLOCK]
        everything += np.bincount(tokens, minlength=full)
        answers += np.bincount(tokens[store.answer[start : start + _BLOCK]], minlength=full)
    counts = everything if recipe.vocab.count_prompts else answers
    stops = [token for token in stop_ids(target, tokenizer) if token < full]
    specials = [] if tokenizer is None else [int(i) for i in tokenizer.all_special_ids if int(i) < full]
    required = sorted({*stops, *(token for token in specials if answers[token])})
    size = min(recipe.vocab.size or full, full)
    chosen = choose(counts, size, required) if size < full else None
    sizes = [size for size in _REPORTED_SIZES if len(required) < size < full]
    table = {str(size): covered(answers, choose(counts, size, required)) for size in sizes}
    facts = {
        "vocab_size": full,
        "data_digest": store.digest,
        "coverage": 1.0 if chosen is None else covered(answers, chosen),
        "coverage_by_size": {**table, str(full): 1.0},
        "distinct_answer_tokens": int((answers > 0).sum()),
    }
    target_ids = None if chosen is None else chosen.tolist()
    write_text(context.directory / VOCABULARY, json.dumps({"target_ids": target_ids, **facts}))
    context.progress.say(f"vocab: {size:,} of {full:,} tokens cover {facts['coverage']:.2%} of the answers")
    return {"size": size, **facts}


STAGE = Stage(name="vocab", version=1, depends_on=("prepare", "regenerate"), settings=settings, run=run)


def choose(counts: NDArray[np.int64], size: int, required: list[int]) -> NDArray[np.int64]:
    """Return `size` ids, ascending: those required, then the most frequent, of equals those with the lower id."""
    if size < len(required):
        raise ConfigError(f"vocab.size: found {size}, but {len(required)} special tokens must be in it")
    ranked = counts.copy()
    ranked[required] = np.iinfo(np.int64).max
    chosen: NDArray[np.int64] = np.sort(np.argsort(-ranked, kind="stable")[:size])
    return chosen


def covered(answers: NDArray[np.int64], chosen: NDArray[np.int64]) -> float:
    """Return the share of answer tokens that are among the chosen."""
    return float(answers[chosen].sum() / max(1, answers.sum()))


def read_vocabulary(directory: Path, vocab_size: int, data_digest: str | None = None) -> DraftVocabulary | None:
    """Return the draft vocabulary that the stage left, None where it is the whole vocabulary.

    With `data_digest` (`TokenStore.digest`) a vocabulary counted on other data is refused.
    """
    path = directory / VOCABULARY
    values = read_json(path) or {}
    if not {"target_ids", "vocab_size", "data_digest"} <= values.keys():
        raise DataError(f"{path}: missing or damaged; run the vocab stage again")
    ids, size, digest = values["target_ids"], values["vocab_size"], values["data_digest"]
    if size != vocab_size:
        raise DataError(f"{path}: made for a vocabulary of {size}, but the target has {vocab_size}; run vocab again")
    if data_digest is not None and digest != data_digest:
        raise DataError(f"{path}: counted on data {digest}, but the examples are {data_digest}; run vocab again")
    if ids is None:
        return None
    if not ids or any(a >= b for a, b in pairwise(ids)) or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise DataError(f"{path}: target_ids must be ascending, from 0 to {vocab_size - 1}; run vocab again")
    return DraftVocabulary.from_target_ids(torch.tensor(ids, dtype=torch.int64), vocab_size)
