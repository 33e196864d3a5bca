"""Turns that a target has answered by itself, and what became of them with a drafter."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fledge.engine.outputs import RequestOutput
from fledge.evaluation.results import RequestRecord, tally_triples
from fledge.evaluation.workloads import Prompt
from fledge.training.evaluation import Turn, first_difference


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One workload at one temperature: its turns, and which prompt each belongs to."""

    turns: tuple[Turn, ...]
    prompts: tuple[str, ...]


def open_turns(prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
    """Without answers, which the target writes itself."""
    return tuple(message for message in prompt.messages if message["role"] != "assistant")


def request_record(prompt: str, output: RequestOutput, in_draft: torch.Tensor | None) -> RequestRecord:
    (completion,) = output.outputs
    tokens = completion.token_ids
    # A round's first refused draft was for the place after those accepted; trimming may have taken that place away.
    places = [r.start + r.accepted - len(output.prompt_token_ids) for r in completion.rounds if r.accepted < r.drafted]
    right = [tokens[place] for place in places if place < len(tokens)]
    return RequestRecord(
        prompt=prompt,
        sent=0.0,  # all are submitted before the first one runs
        first_token=output.metrics.time_to_first_token,
        done=output.metrics.seconds,
        prompt_tokens=len(output.prompt_token_ids),
        output_tokens=len(tokens),
        digest=hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
        acceptance=tally_triples(output.metrics.acceptance),
        missed=len(right),
        missed_outside=0 if in_draft is None else sum(not in_draft[token] for token in right),
    )


def different_turns(turns: Sequence[Turn], outputs: Sequence[RequestOutput]) -> dict[int, int]:
    """Turns whose answer is not the target's own -> the first token that differs."""
    answers = [output.outputs[0].token_ids for output in outputs]
    return {
        number: first_difference(answer, turn.answer)
        for number, (turn, answer) in enumerate(zip(turns, answers, strict=True))
        if tuple(answer) != turn.answer
    }
