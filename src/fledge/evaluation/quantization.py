"""What fewer bits did to a target: perplexity, and how much of a drafter's work it still accepts.

Both are of the same prompts, before and after. The perplexity is of the prompts themselves, through the chat template;
the drafter is asked for answers of the target that it drafts for, before and after.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fledge.decoding.params import SamplingParams
from fledge.evaluation.acceptance import AcceptanceMeter, AcceptanceSettings
from fledge.evaluation.workloads import Workload, tokenised
from fledge.records import Record

DEPTH = 3
MAX_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Quality(Record):
    """One target on some workloads."""

    target: str
    prompts: int
    tokens: int  # whose likelihood was measured
    perplexity: float
    acceptance_length: float | None  # with the drafter, at `DEPTH`; None: there is none, or it never drafted
    unchanged: bool | None  # whether every answer is, with drafts, what the target says alone; ties aside


def measure_quality(
    target: str, drafter: str | None, workloads: Sequence[Workload], *, device: str = "auto"
) -> Quality:
    """Load a target and measure it. On a CPU it computes in float32, whatever its weights are stored in."""
    meter = AcceptanceMeter(AcceptanceSettings(target=target, max_tokens=MAX_TOKENS, device=device))
    try:
        prompts = [list(ids) for one in workloads for ids in tokenised(one, target)]
        room = meter.llm.max_model_len - 1
        asked = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
        outputs = meter.llm.generate([ids[:room] for ids in prompts], asked)
        told = [one.logprob for output in outputs for one in output.prompt_logprobs or () if one.logprob is not None]
        length, unchanged = (None, None) if drafter is None else _drafted(meter, drafter, workloads)
        return Quality(
            target=target,
            prompts=len(prompts),
            tokens=len(told),
            perplexity=math.exp(-sum(told) / len(told)),
            acceptance_length=length,
            unchanged=unchanged,
        )
    finally:
        meter.close()


def _drafted(meter: AcceptanceMeter, drafter: str, workloads: Sequence[Workload]) -> tuple[float | None, bool]:
    """Tokens a round, and whether the target's answers stayed its own."""
    turns = meter.answer(workloads, 0.0).turns
    meter.exchange(drafter, DEPTH)
    measured = meter.measure(turns, 0.0)
    return measured.total.acceptance_length, not meter.clear_differences(turns, measured.different, 0.0)
