"""Measures how deep vLLM should draft at each batch size.

vLLM is started once for each depth (0: without a drafter) and measured at each concurrency. `engine/vllm_tuning.py`
chooses the depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fledge.bench.offline import ClosedLoop, cycled
from fledge.decoding.params import SamplingParams
from fledge.engine.vllm_engine import VllmEngine
from fledge.engine.vllm_tuning import TunePoint
from fledge.errors import ConfigError, FledgeError
from fledge.evaluation.results import statistics_of
from fledge.evaluation.workloads import Prompt
from fledge.progress import Progress

WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What to measure, and how."""

    target: str
    drafter: str
    depths: tuple[int, ...]
    concurrencies: tuple[int, ...]
    prompts: Sequence[Prompt]  # with their token ids
    requests: int | None = None  # per point; None: two for each in flight
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    python: str | None = None
    words: tuple[str, ...] = ()  # arguments of vLLM's command line


def measure(
    settings: TuneSettings, progress: Progress, open_engine: Callable[..., VllmEngine] = VllmEngine
) -> list[TunePoint]:
    """Measure every depth at every concurrency, with one vLLM at a time."""
    points: list[TunePoint] = []
    for depth in sorted({0, *settings.depths}):
        speculation = {"model": settings.drafter, "num_speculative_tokens": depth} if depth else None
        progress.say(f"starting vLLM, {f'{depth} drafts deep' if depth else 'without a drafter'}")
        engine = open_engine(
            settings.target,
            python=settings.python,
            words=settings.words,
            speculative_config=speculation,
            max_num_seqs=max(settings.concurrencies),
            enable_prefix_caching=False,  # prompts are repeated
        )
        try:
            points += [_point(engine, settings, depth, concurrency) for concurrency in settings.concurrencies]
        finally:
            engine.close()
    return points


def _point(engine: VllmEngine, settings: TuneSettings, depth: int, concurrency: int) -> TunePoint:
    longest = engine.info.max_model_len - settings.max_tokens
    fitting = [prompt for prompt in settings.prompts if len(prompt.token_ids) <= longest]
    if not fitting:
        raise ConfigError(f"no prompt fits into vLLM's {engine.info.max_model_len} tokens with an answer")

    def answer(count: int, max_tokens: int) -> ClosedLoop:
        params = SamplingParams(temperature=settings.temperature, max_tokens=max_tokens, ignore_eos=settings.ignore_eos)
        loop = ClosedLoop(
            engine=engine,
            prompts=cycled(fitting, count),
            concurrency=concurrency,
            params=params,
            eos_ids=engine.info.eos_ids,
        )
        loop.run()
        if error := next((record.error for record in loop.records if record.error is not None), None):
            raise FledgeError(f"at depth {depth} and {concurrency} requests at once: {error}")
        return loop

    answer(concurrency, min(WARM_UP_TOKENS, settings.max_tokens))
    timed = answer(max(settings.requests or 2 * concurrency, concurrency), settings.max_tokens)
    seen = statistics_of(triple for record in timed.records for triple in record.acceptance)
    return TunePoint(
        concurrency=concurrency,
        depth=depth,
        tokens_per_second=sum(record.output_tokens for record in timed.records) / timed.seconds,
        acceptance_length=seen.acceptance_length,
    )
