"""What quantization did to a target: its perplexity, and how much of a drafter's work it still accepts.

Both are measured on the same prompts before and after. Perplexity is that of the prompts themselves, through the chat
template; acceptance is measured while the target answers them with the drafter. `mean_squared_inputs` measures on other
prompts how much each column of a matrix matters, for calibration.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.decoding.params import SamplingParams
from fledge.devices import choose_device
from fledge.evaluation.acceptance import AcceptanceMeter, AcceptanceSettings
from fledge.evaluation.workloads import Workload, tokenised
from fledge.layers.dense_cache import DenseCache
from fledge.layers.linear import Linear
from fledge.progress import Progress
from fledge.records import Record
from fledge.report.intervals import Bootstrap, Counts, Interval

DEPTH = 3
MAX_TOKENS = 64
BOOTSTRAP = Bootstrap()
CALIBRATION_PROMPTS = 32  # of each workload


@dataclass(frozen=True, kw_only=True)
class Quality(Record):
    """One target on some workloads. Counts are by prompt, so that two targets can be compared prompt by prompt."""

    target: str
    surprise: Counts  # negative log-likelihood, and number of tokens
    accepted: Counts | None  # accepted drafts, and rounds at `DEPTH`; None: there is no drafter
    unchanged: bool | None  # whether drafts changed no answer of the target, except at ties

    @property
    def tokens(self) -> int:
        return sum(int(tokens) for _, tokens in self.surprise.values())

    @property
    def perplexity(self) -> float:
        return math.exp(sum(total for total, _ in self.surprise.values()) / self.tokens)

    @property
    def acceptance_length(self) -> Interval | None:
        return BOOTSTRAP.acceptance_length(self.accepted) if self.accepted is not None else None


@dataclass(frozen=True, kw_only=True)
class QualityChange(Record):
    """How a target changed, over the same prompts."""

    perplexity: Interval  # a factor
    acceptance_length: Interval | None  # a difference

    @classmethod
    def between(cls, before: Quality, after: Quality) -> "QualityChange":
        surprise = BOOTSTRAP.compare(after.surprise, before.surprise)
        assert surprise is not None
        logs = surprise.difference.value, surprise.difference.low, surprise.difference.high
        value, low, high = (None if one is None else math.exp(one) for one in logs)
        assert value is not None
        length = BOOTSTRAP.compare(after.accepted or {}, before.accepted or {}, offset=1.0)
        return cls(
            perplexity=Interval(value=value, low=low, high=high),
            acceptance_length=length.difference if length is not None else None,
        )


def measure_quality(target: str, drafter: str | None, workloads: Sequence[Workload]) -> Quality:
    """Load a target and measure it. On a CPU it computes in float32, whatever the dtype of its weights."""
    meter = AcceptanceMeter(AcceptanceSettings(target=target, max_tokens=MAX_TOKENS))
    try:
        names = [f"{one.name}/{prompt.id}" for one in workloads for prompt in one.prompts]
        prompts = [list(ids) for one in workloads for ids in tokenised(one, target)]
        room = meter.llm.max_model_len - 1
        asked = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
        outputs = meter.llm.generate([ids[:room] for ids in prompts], asked)
        surprise = {}
        for name, output in zip(names, outputs, strict=True):
            told = [one.logprob for one in output.prompt_logprobs or () if one.logprob is not None]
            surprise[name] = (-sum(told), float(len(told)))
        accepted, unchanged = (None, None) if drafter is None else _drafted(meter, drafter, workloads)
        return Quality(target=target, surprise=surprise, accepted=accepted, unchanged=unchanged)
    finally:
        meter.close()


def _drafted(meter: AcceptanceMeter, drafter: str, workloads: Sequence[Workload]) -> tuple[Counts, bool]:
    """Return accepted drafts and rounds of each prompt, and whether the target's answers were unchanged."""
    turns = meter.answer(workloads, 0.0).turns
    meter.set_drafter(drafter, DEPTH)
    measured = meter.measure(turns, 0.0)
    pooled = measured.grouped(f"{turn.workload}/{turn.prompt}" for turn in turns)
    counts = {name: (float(sum(one.accepted_by_depth)), float(one.rounds)) for name, one in pooled.items()}
    return counts, not meter.clear_differences(turns, measured.different, 0.0)


@torch.no_grad()
def mean_squared_inputs(
    target: str, workloads: Sequence[Workload], progress: Progress | None = None
) -> dict[str, Tensor]:
    """Return the mean squared input of each column of each linear layer of a target on these prompts, by name.

    Experts that no token was routed to are not included.
    """
    where = choose_device("auto")
    model = load_target(resolve(target), dtype=torch.float32 if where.type == "cpu" else None, device=where)
    sums: dict[str, Tensor] = {}
    rows: Counter[str] = Counter()

    def add(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float().flatten(0, -2)
        sums[name] = sums.get(name, torch.zeros_like(x[0])) + x.square().sum(0)
        rows[name] += len(x)

    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(partial(add, name))
    prompts = [ids[: model.config.max_positions] for one in workloads for ids in tokenised(one, target)]
    with (progress or Progress(quiet=True)).task("calibrating", len(prompts)) as advance:
        for ids in prompts:
            positions = torch.arange(len(ids), device=where)
            storage = DenseCache(model.config.num_layers, where).extend(positions)
            model(torch.tensor(ids, device=where), positions, storage, ())
            advance()
    return {name: (total / max(rows[name], 1)).cpu() for name, total in sums.items()}
