"""A byte-level tokenizer with ChatML's tokens, and probe results made up for tests of what is done with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fledge.drift.perturb import chat_template
from fledge.drift.prompts import LABELS, ProbePrompt
from fledge.drift.result import AttentionMeans, Calibration, DepthMetrics, DriftResult, FusionShare, PromptRow

BOS, START, END = "<|begin|>", "<|im_start|>", "<|im_end|>"


def byte_tokenizer(*, bos: bool = True) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, additional_special_tokens=[START], bos_token=BOS if bos else None
    )
    fast.chat_template = chat_template("chatml")
    return fast


def conversation(*turns: str, id: str = "one", system: str | None = None) -> ProbePrompt:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return ProbePrompt(id=id, category="test", messages=tuple(messages))


def drift_result(
    prompts: Mapping[str, tuple[int, int]],
    *,
    recent: Sequence[float] = (0.1, 0.3, 0.6),
    sink: Sequence[float] | None = None,
    user: float = 0.25,
    shares: Mapping[str, float] | None = None,
    perturbation: str | None = None,
    drafter: str = "drafter",
) -> DriftResult:
    """`prompts`: id -> (accepted, rounds), at most one accepted a round. `recent`, `sink`: attention by depth.

    Attention on drafts is that on recent rows, and prompts differ a little in it, where there are several.
    """
    depth = len(recent)
    sinks = sink or [1 - share - user for share in recent]
    calibration = Calibration(bins=(), error=0.07)
    tallies = {
        name: ((depth, 0, rounds - accepted), (depth, 1, accepted)) for name, (accepted, rounds) in prompts.items()
    }
    tally = tuple((drafted, accepted, count) for rows in tallies.values() for drafted, accepted, count in rows)
    return DriftResult(
        drafter=drafter,
        variant="EAGLE-3",
        norm_output=False,
        target="target",
        workload="made up",
        perturbation=perturbation,
        temperature=0.0,
        trained_depth=7,
        depth=depth,
        engine_depth=depth,
        prompts=len(prompts),
        prompt_tokens=10,
        output_tokens=5 * len(prompts),
        recent_tokens=4,
        tally=_pooled(tally),
        fresh_tally=_pooled(tally),
        engine_tally=_pooled(tally),
        by_depth=tuple(
            _depth(number, *shares, user, calibration)
            for number, shares in enumerate(zip(recent, sinks, strict=True), start=1)
        ),
        fused_rms=1.0,
        fusion_shares=tuple(
            FusionShare(part=part, share=share, norm=share)
            for part, share in (shares or {"layer 2": 0.1, "layer 9": 0.2, "layer 16": 0.7}).items()
        ),
        calibration=calibration,
        prompt_rows=tuple(
            PromptRow(
                id=name,
                category="test",
                prompt_tokens=5,
                output_tokens=5,
                repeated_tokens=0,
                tally=tallies[name],
                fresh_tally=tallies[name],
                rounds_by_depth=(rounds,) * depth,
                recent_attention=_spread(recent, number, len(prompts)),
                sink_attention=_spread(sinks, number, len(prompts)),
            )
            for number, (name, (_, rounds)) in enumerate(prompts.items())
        ),
        examples=(),
    )


def _spread(shares: Sequence[float], number: int, prompts: int) -> tuple[float, ...]:
    """Of one prompt: up to a point of attention more or less at each depth after the first; the mean stays."""
    away = 0.02 * (number / (prompts - 1) - 0.5) if prompts > 1 else 0.0
    return (shares[0], *(share + away for share in shares[1:]))


def _pooled(tally: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    sums: dict[tuple[int, int], int] = {}
    for drafted, accepted, count in tally:
        sums[drafted, accepted] = sums.get((drafted, accepted), 0) + count
    return tuple((*key, count) for key, count in sorted(sums.items()))


def _depth(number: int, recent: float, sink: float, user: float, calibration: Calibration) -> DepthMetrics:
    mass = dict.fromkeys(LABELS, 0.0) | {"drafted": recent, "user": user, "sink": sink}
    return DepthMetrics(
        depth=number,
        rounds=10,
        attention=AttentionMeans(mass=mass, recent=recent, entropy=1.0, normalised_entropy=0.5, distance=3.0),
        heads=(),
        uniform_mass=mass,
        hidden_rms=float(number),
        head_rms=1.0,
        feature_rms=1.0,
        hidden_growth=float(number),
        head_growth=1.0,
        feature_growth=1.5,
        confidence=0.5,
        acceptance=0.5,
        conditional_acceptance=0.5,
        reached=10,
        missed=4,
        missed_outside_vocabulary=1,
        head_cosine=None,
        feature_cosine=None,
        calibration=calibration,
    )
