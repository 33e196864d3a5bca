"""The engine on a GPU against the reference loop, graphs on and off, and bf16 with and without speculation.

Also runs as a script where pytest is not:  PYTHONPATH=src:. python tests/gpu/test_engine.py [part of a name ...]

Two ways to compute the same logits differ in their last bits, so two answers may part where two tokens are all but
equal. Every place where answers part is judged: float64 on the CPU says how close the two tokens were.
"""

import copy
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)

from fledge.bench.rounds import quantize_linears
from fledge.decoding import reference
from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.random import Stream, uniform
from fledge.decoding.reference import Speculation
from fledge.decoding.sampling import adjust_logits, distribution
from fledge.engine import scheduler, work_ahead
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.mixing import MixedProgram, Mixing
from fledge.engine.request import Request
from fledge.engine.work_ahead import WorkAhead
from fledge.kernels.cache_codes import FP8
from fledge.layers.block import can_run_fused
from fledge.layers.dense_cache import DenseCache
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_1
from fledge.models.target.decoder import TargetModel
from tests.engine_cases import AnyBudget, AnyDepth, add_request, speculation, verify_share
from tests.gpu.script import run_checks
from tests.mixing_cases import mix
from tests.tiny_models import TARGET_CONFIGS, TINY_LAYER, TINY_TARGET, drafter_configs, make_drafter, make_target

GPU = "cuda"
LAYER = replace(TINY_LAYER, hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=32)
CONFIG = replace(TINY_TARGET, vocab_size=512, num_layers=4, layer=LAYER, max_positions=512)
SMALL = replace(CONFIG, vocab_size=24, num_layers=8)  # eight layers: for drafters that read up to the sixth
# Wide enough for batches of different sizes to be summed in different orders.
WIDE = replace(
    CONFIG,
    vocab_size=2048,
    layer=replace(LAYER, hidden_size=1024, intermediate_size=1536, num_heads=8, head_dim=128),
)
TREE = TreeShape(width=3, budget=9)
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def agreeing_pair(config: TargetConfig = CONFIG, strength: float = 2.0) -> tuple[TargetModel, Drafter]:
    """A target that mostly follows a permutation of its tokens, and a drafter that is often right about it."""
    target = make_target(config)
    generator = torch.Generator().manual_seed(5)
    size = config.hidden_size
    target.lm_head.weight[torch.randperm(config.vocab_size, generator=generator)] += (
        strength * target.embed_tokens.weight / size**0.5
    )
    drafter = make_drafter(EAGLE_1.config_for(config), target)
    feature = 0.3 * torch.randn(size, size, generator=generator) / size**0.5
    drafter.fc.weight.copy_(torch.cat([torch.eye(size), feature], dim=1))  # type: ignore[operator, union-attr]
    for name, parameter in drafter.named_parameters():
        if name.startswith("layers.") and parameter.dim() == 2:
            parameter.mul_(0.4)
    return target, drafter


def on_gpu(target: TargetModel, drafter: Drafter, dtype: torch.dtype) -> tuple[TargetModel, Drafter]:
    target, drafter = copy.deepcopy((target, drafter))
    target, drafter = target.to(GPU, dtype), drafter.to(GPU, dtype)
    drafter.share_with(target)
    return target, drafter


def make_engine(
    target: TargetModel,
    drafter: Drafter | None,
    depth: Callable[[int], int],
    *,
    tree: TreeShape | None = None,
    sample_drafts: bool = False,
    **settings: object,
) -> LLMEngine:
    values = {"max_model_len": 256, "max_num_seqs": 16, "num_blocks": 400, "block_size": 16, **settings}
    if drafter is not None:
        values["speculative_config"] = speculation(4, tree=tree, sample_drafts=sample_drafts)
    return LLMEngine(target, drafter, EngineConfig(**values), AnyDepth(depth, (0, 3, 4), is_tree=tree is not None))  # type: ignore[arg-type]


def next_logits(target: TargetModel, text: list[int], kept: torch.dtype | None = None) -> Tensor:
    """The target's logits after a text, [1, vocab], read from scratch. `kept`: dtype of keys and values, if another."""
    device = target.embed_tokens.weight.device
    tokens, positions = torch.tensor(text, device=device), torch.arange(len(text), device=device)
    states = target(tokens, positions, DenseCache(target.config.num_layers, device, dtype=kept).extend(positions))
    return target.logits(states.final[-1:])


def distance(
    exact: TargetModel, request: Request, known: list[int], one: int, other: int, kept: torch.dtype | None
) -> float:
    """How far from a tie two tokens are after an answer that began with `known`: in logits, or in probability."""
    sequence = reference._Sequence(
        target=exact, prompt=request.prompt, params=request.params, seed=request.seed, max_length=None, eos_ids=()
    )
    sequence.stop_ids = request.stop_ids
    sequence.tokens = [*request.prompt, *known]
    forbidden = sequence._forbidden(torch.zeros(1, dtype=torch.int64))
    history, rows = sequence._history(None), sequence.sampling
    logits = next_logits(exact, sequence.tokens, kept)
    if request.params.is_greedy:
        adjusted = adjust_logits(logits, rows, history=history, forbidden=forbidden)[0]
        return float(max(adjusted.max() - adjusted[one], adjusted.max() - adjusted[other]))
    cumulative = distribution(logits, rows, history=history, forbidden=forbidden)[0].double().cumsum(-1)
    drawn = uniform(rows.seed, torch.tensor([len(sequence.tokens)]), Stream.CHOICE) * cumulative[-1]
    low, high = sorted((one, other))
    return float((cumulative[low:high] - drawn).abs().max())


def part(one: list[int], other: list[int]) -> int | None:
    """Where two answers part, if they do."""
    for i, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def random_params(chance: random.Random) -> SamplingParams:
    values: dict[str, object] = {
        "temperature": chance.choice([0.0, 0.0, 0.7, 1.2]),
        "max_tokens": chance.randint(1, 40),
        "stop_token_ids": chance.choice([[], [], [chance.randrange(24)]]),
    }
    extras: list[dict[str, object]] = [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {3: 2.0, 7: -4.0}},
        {"logprobs": 3},
        {"min_tokens": 1},
    ]
    if chance.random() < 0.4:
        values |= chance.choice(extras)
    return SamplingParams.from_dict(values)


def random_mix(
    target: TargetModel,
    drafter: Drafter,
    exact: TargetModel,
    seed: int,
    count: int,
    *,
    budgets: bool = False,
    one_pass: bool = False,
    warm: bool = False,
    **settings: object,
) -> tuple[int, int]:
    """Random requests that join, leave and are aborted; returns how many ended and how many parted at a near-tie.

    `budgets`: of many rounds some drafts only are verified. `one_pass`: prompts go with rounds wherever they can.
    `warm`: the engine has warmed up.
    """
    chance = random.Random(seed)
    depth = chance.randint(1, 4)
    engine = make_engine(target, drafter, lambda _: depth, **settings)
    if warm:
        engine.warm_up()
    budget = verify_share(engine, 0.5) if budgets else AnyBudget(4, None)
    mixing = mix(engine, chance.choice([None, 7, 40])) if one_pass else None
    vocab = target.config.vocab_size
    stem = [chance.randrange(vocab) for _ in range(70)]
    asked: list[Request] = []
    while len(asked) < count or engine.has_unfinished:
        if len(asked) < count and chance.random() < 0.6:
            prompt = stem[: chance.randint(0, 70)] + [chance.randrange(vocab) for _ in range(chance.randint(1, 5))]
            speculate = chance.random() < 0.85
            params, limit = random_params(chance), None if speculate else 0
            asked.append(add_request(engine, str(len(asked)), prompt, params, seed=len(asked), draft_limit=limit))
        if asked and chance.random() < 0.04:
            engine.abort(chance.choice(asked).id)
        if chance.random() < 0.1 and not settings.get("sample_drafts"):
            depth = chance.randint(0, 4)
        if chance.random() < 0.2:
            budget.share = chance.choice([None, 0.0, 0.25, 0.5, 0.7, 1.0])
        engine.step()
        engine.check_integrity()
    assert engine.block_manager.used == 0
    assert not budgets or budget.rounds[True] > 0, budget.rounds
    assert mixing is None or mixing.steps[True] > 0, mixing.steps
    parted, kept = 0, FP8 if "kv_cache_dtype" in settings else None
    near = 1e-4 if kept is None else 0.05  # a code that falls the other way is off by a sixteenth
    for request in asked:
        speculation = None
        if settings.get("sample_drafts") and request.draft_until and not request.params.is_greedy:
            speculation = Speculation(drafter=drafter, depth=depth, sample_drafts=True)
        rounds = reference.generate(
            target,
            request.prompt,
            replace(request.params, stop_token_ids=tuple(request.stop_ids)),
            seed=request.seed,
            speculation=speculation,
            max_length=256,
            kv_cache_dtype=kept,
        )
        tokens = [token for done in rounds for token in done.tokens]
        if request.finish_reason == "abort":
            tokens = tokens[: request.num_output]
        at = part(request.output, tokens)
        if at is None:
            continue
        assert at < min(len(tokens), request.num_output), f"one of {request.output} and {tokens} is longer"
        assert speculation is None, f"sampled drafts: {request.output} is not {tokens}"
        gap = distance(exact, request, tokens[:at], tokens[at], request.output[at], kept)
        assert gap < near, f"{request.output} parts from {tokens} at {at}, {gap} from a tie: {request.params}"
        parted += 1
    return len(asked), parted


def mixes(**settings: Any) -> None:
    ended = parted = 0
    for number, (name, config) in enumerate(drafter_configs(SMALL).items()):
        cpu = make_target(SMALL)
        target, drafter = on_gpu(cpu, make_drafter(config, cpu, seed=2), torch.float32)
        exact = copy.deepcopy(cpu).double()
        some = random_mix(target, drafter, exact, number, 12, **settings)
        ended, parted = ended + some[0], parted + some[1]
        # Sums in another order may put a key on the next code: near-ties are then wider, and a few in a hundred.
        most = max(2, ended // 10) if "kv_cache_dtype" in settings else 2
        assert parted <= most, f"too many near-ties to be chance ({name}): {parted} of {ended}"
    print(f"  {ended} requests, {parted} of them parted from the reference at a near-tie")


@check
def mixes_over_latent_rows() -> None:
    for number, name in enumerate(("deepseek-v2", "deepseek-v3")):
        cpu = make_target(replace(TARGET_CONFIGS[name], vocab_size=24, max_positions=512))
        drafter = make_drafter(drafter_configs(cpu.config)["eagle3.1"], cpu, seed=2)
        for tree in (None, TREE):
            pair, exact = on_gpu(cpu, drafter, torch.float32), copy.deepcopy(cpu).double()
            parted = random_mix(*pair, exact, number, 12, tree=tree, budgets=tree is None)[1]
            assert parted <= 2, "too many near-ties to be chance"


@check
def mixes_with_graphs() -> None:
    mixes()


@check
def mixes_without_graphs() -> None:
    mixes(enforce_eager=True)


@check
def mixes_of_trees() -> None:
    mixes(tree=TREE)


@check
def mixes_of_admitted_drafts() -> None:
    mixes(budgets=True)
    mixes(budgets=True, enforce_eager=True)


@check
def mixes_in_one_pass() -> None:
    mixes(one_pass=True)


@check
def works_ahead_while_requests_run() -> None:
    """Graphs are captured and timed between steps, as soon as they are wanted: passes of both too, and they are run."""
    seconds: list[float] = []
    mixed: list[MixedProgram] = []
    advance, run = WorkAhead.advance, Mixing.run

    def timed(self: WorkAhead) -> bool:
        began = time.perf_counter()
        found = advance(self)
        seconds.extend([time.perf_counter() - began] if found else [])
        return found

    def counted(self: Mixing, program: MixedProgram, work: Any) -> Any:
        mixed.append(program)
        return run(self, program, work)

    cpu = make_target(SMALL)
    pair = on_gpu(cpu, make_drafter(drafter_configs(SMALL)["eagle3.1"], cpu, seed=2), torch.float32)
    with (
        mock.patch.multiple(work_ahead, OFTEN=1, BUSY_SHARE=1e9),
        mock.patch.object(WorkAhead, "advance", timed),
        mock.patch.object(Mixing, "run", counted),
    ):
        ended, parted = random_mix(*pair, copy.deepcopy(cpu).double(), 1, 48, warm=True)
    print(
        f"  {ended} requests, {parted} parted at a near-tie; {len(seconds)} pieces between steps, "
        f"{1e3 * sorted(seconds)[len(seconds) // 2]:.0f} ms each, at most {1e3 * max(seconds):.0f}; "
        f"{len(mixed)} passes of both"
    )
    assert parted <= 2, "too many near-ties to be chance"
    assert len(seconds) > 20
    assert mixed


@check
def mixes_of_sampled_drafts() -> None:
    # What is drawn depends on what was drafted, so prompts draft as the reference's do, however few join.
    with mock.patch.object(scheduler, "MIN_NEW_SHARE", 0):
        mixes(sample_drafts=True)


@check
def mixes_with_fp8_keys_and_values() -> None:
    mixes(kv_cache_dtype="fp8")


@check
def mixes_of_trees_with_fp8_keys_and_values() -> None:
    mixes(kv_cache_dtype="fp8", tree=TREE)


@check
def mixes_in_a_small_pool_with_fp8_keys_and_values() -> None:
    mixes(kv_cache_dtype="fp8", budgets=True, num_blocks=24)


@check
def mixes_in_a_small_pool() -> None:
    mixes(num_blocks=24, max_num_batched_tokens=24)


@check
def mixes_read_at_once() -> None:
    mixes(read_late=False)


@check
def graphs_change_no_token_and_no_acceptance() -> None:
    """Captured or not, a padded batch that shrinks from five to one: exactly the same, not just nearly."""
    target, drafter = on_gpu(*agreeing_pair(), torch.float32)
    found = []
    for eager in (False, True):
        engine = make_engine(target, drafter, lambda _: 3, enforce_eager=eager)
        requests = [
            add_request(engine, str(i), [i, 7, 9], SamplingParams(temperature=0, max_tokens=8 + 9 * i))
            for i in range(5)
        ]
        while engine.has_unfinished:
            engine.step()
            engine.check_integrity()
        found.append([(request.output, request.acceptance.tally) for request in requests])
        accepted = sum(sum(request.acceptance.accepted_by_depth) for request in requests)
        assert accepted > 10, "nothing was accepted, so little was tested"
    assert found[0] == found[1]


@check
def every_family_answers_what_float64_says() -> None:
    """Captured or not. No token is behind the best by more than float32 may be wrong."""
    for name, config in TARGET_CONFIGS.items():
        if config.layer.softcap is not None:  # no kernel has it: `check_runs_on` refuses
            continue
        plain = make_target(config)
        target, drafter = on_gpu(plain, make_drafter(drafter_configs(config)["eagle3.1"], plain), torch.float32)
        exact = copy.deepcopy(plain).double()
        for eager in (False, True):
            engine = make_engine(target, drafter, lambda _: 3, enforce_eager=eager)
            params = SamplingParams(temperature=0, max_tokens=24)
            requests = [add_request(engine, str(i), [i, 7, 9, 11, 2, 3], params) for i in range(5)]
            while engine.has_unfinished:
                engine.step()
            for request in requests:
                text = torch.tensor([*request.prompt, *request.output])
                positions = torch.arange(len(text) - 1)
                states = exact(text[:-1], positions, DenseCache(config.num_layers).extend(positions))
                logits = exact.logits(states.final)[len(request.prompt) - 1 :]
                behind = logits.amax(-1) - logits.gather(1, text[len(request.prompt) :, None])[:, 0]
                assert float(behind.max()) < 1e-3, (name, eager, float(behind.max()))


@check
def bf16_speculation_parts_only_at_near_ties() -> None:
    speculation_parts_only_at_near_ties(*on_gpu(*agreeing_pair(WIDE, strength=0.45), torch.bfloat16))


@check
def bf16_speculation_of_few_parts_only_at_near_ties() -> None:
    """Two at once: up to eight rows, whose linear layers are fused."""
    pair = on_gpu(*agreeing_pair(WIDE, strength=0.45), torch.bfloat16)
    layer = pair[0].layers[0]
    norms = layer.input_layernorm, layer.post_attention_layernorm
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert (
        can_run_fused(torch.empty(8, 1024, dtype=torch.bfloat16, device=GPU), layer.self_attn, layer.mlp, *norms)
        == is_hopper
    )
    speculation_parts_only_at_near_ties(*pair, prompts=40, at_once=2)


@check
def fp8_activations_part_only_at_near_ties() -> None:
    """Whose error is larger: a sum in another order puts some numbers on the next code."""
    target, drafter = on_gpu(*agreeing_pair(WIDE, strength=0.9), torch.bfloat16)
    quantize_linears(target, "fp8-dynamic")
    speculation_parts_only_at_near_ties(target, drafter, prompts=50)  # exact ones take a second each on a CPU


def speculation_parts_only_at_near_ties(
    target: TargetModel, drafter: Drafter, *, prompts: int = 200, at_once: int = 64
) -> None:
    """So many prompts in bf16 with and without speculation. Where answers part, both tokens are as near the best as the
    error of bf16, which is measured in the same place, lets them be."""
    exact = copy.deepcopy(target).cpu().double()  # the same weights as bf16 has them
    chance = random.Random(0)
    texts = [[chance.randrange(WIDE.vocab_size) for _ in range(chance.randint(2, 60))] for _ in range(prompts)]
    params = SamplingParams(temperature=0, max_tokens=64)
    outputs = {}
    for depth in (0, 3):
        engine = make_engine(target, drafter, lambda _, depth=depth: depth, max_num_seqs=at_once, num_blocks=4000)  # type: ignore[misc]
        requests = [add_request(engine, str(i), text, params) for i, text in enumerate(texts)]
        while engine.has_unfinished:
            engine.step()
        outputs[depth] = [request.output for request in requests]
        if depth:
            length = engine.stats().acceptance.acceptance_length

    def with_error(text: list[int]) -> tuple[Tensor, float]:
        logits = next_logits(exact, text)[0]
        return logits, float((next_logits(target, text)[0].double().cpu() - logits).abs().max())

    found = []  # of each place where answers part: distance from the likeliest token, bf16's error there
    for request, plain, speculative in zip(requests, outputs[0], outputs[3], strict=True):
        at = part(plain, speculative)
        if at is None:
            continue
        text = [*request.prompt, *plain[:at]]
        logits, error = with_error(text)
        behind = float(logits.max() - torch.minimum(logits[plain[at]], logits[speculative[at]]))
        found.append((behind, error))
    close = 0  # prompts after which the second token is that near: a rule that most places meet would say nothing
    for text in texts:
        logits, error = with_error(text)
        close += float(logits.topk(2).values.diff().abs()) < 2 * error
    print(
        f"  acceptance length {length:.2f}; {len(found)} of {prompts} answers part, where the worse token is at most "
        f"{max((behind for behind, _ in found), default=0):.4f} behind the best, "
        f"{max((behind / error for behind, error in found), default=0):.2f} times the error of bf16 there "
        f"({max((error for _, error in found), default=0):.4f}); the second is that near after {close} of {prompts}"
    )
    # A token that is chosen although logits are off by no more than e is at most 2 e behind the best.
    assert close < prompts / 2
    assert all(behind < 2 * error for behind, error in found), sorted(found)[-5:]


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_engine(name: str) -> None:
        with torch.no_grad():
            CHECKS[name]()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    with torch.no_grad():
        sys.exit(run_checks(CHECKS, sys.argv[1:]))
