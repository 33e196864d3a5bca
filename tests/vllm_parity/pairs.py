"""The pairs on which Fledge and vLLM must agree: one for each thing a drafter's config or files can say."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from torch import Tensor

from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.formats.drafter_classes import Format
from fledge.checkpoints.target import load_target, save_target
from fledge.layers.config import ExpertsConfig, LayerConfig, RopeConfig, TemperatureConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1
from fledge.models.target import FAMILIES
from tests.shared_directory import shared_directory
from tests.vllm_parity.small_training import Budget, synthetic_text, train_drafter, train_target

VOCAB_SIZE = 192
MAX_POSITIONS = 256

_LAYER = LayerConfig(
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,  # the smallest that vLLM's CPU attention has a kernel for
    norm_eps=1e-5,
    rope=RopeConfig(type="llama3", theta=50000.0, factor=4.0, original_max_positions=64),
)
LLAMA = TargetConfig(
    family="llama",
    layer=_LAYER,
    num_layers=8,
    vocab_size=VOCAB_SIZE,
    max_positions=MAX_POSITIONS,
    tied_head=False,
)
QWEN3 = replace(
    LLAMA, family="qwen3", layer=replace(_LAYER, qk_norm=True, rope=RopeConfig(theta=1_000_000.0)), tied_head=True
)

# Families with experts that this build of vLLM runs with EAGLE-3 drafters; docs/checkpoints.md tells of the others.
_EXPERTS = ExpertsConfig(num_experts=4, num_experts_per_token=2, intermediate_size=64)
_PLAIN = replace(_LAYER, rope=RopeConfig(theta=50000.0))
_SMALL = replace(LLAMA, layer=_PLAIN, num_layers=4)
_AUX_IDS = (1, 2, 3)
QWEN3_MOE = replace(_SMALL, family="qwen3_moe", layer=replace(_PLAIN, qk_norm=True, experts=_EXPERTS))
GPT_OSS = replace(
    _SMALL,
    family="gpt_oss",
    layer=replace(
        _PLAIN,
        rope=RopeConfig(type="yarn", theta=50000.0, factor=8.0, original_max_positions=32, truncate=False),
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        experts=replace(_EXPERTS, bias=True, swiglu_limit=7.0, intermediate_size=_PLAIN.intermediate_size),
    ),
    sliding_windows=(12, None) * 2,
)
_LLAMA4_LAYER = replace(
    _PLAIN,
    rope=replace(_PLAIN.rope, interleaved=True),
    experts=replace(_EXPERTS, num_experts_per_token=1, shared_size=64, normalised=False, weighted_inputs=True),
    rotated_norm=True,
    chunked=True,
)
LLAMA4 = replace(
    _SMALL,
    family="llama4_text",
    layer=_LLAMA4_LAYER,
    layers=(
        *[_LLAMA4_LAYER] * 3,
        replace(
            _LLAMA4_LAYER,
            rope=replace(_LLAMA4_LAYER.rope, partial_factor=0.0),
            rotated_norm=False,
            temperature=TemperatureConfig(floor_scale=16, attn_scale=0.3),
            chunked=False,
        ),
    ),
    sliding_windows=(32, 32, 32, None),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pair, and the format its drafter is written in."""

    name: str
    target: TargetConfig
    drafter: DrafterConfig
    format: Format = "vllm"
    train_steps: int = 100  # few: a drafter that has learned all of so simple a text would never be wrong
    target_steps: int = 220
    depths: tuple[int, ...] = (3, 5)
    block_size: int | None = None  # of vLLM's cache, where its own choice does not suit the target

    @property
    def method(self) -> str:
        """What vLLM calls the drafter. 3.1 is `eagle3` there."""
        return "eagle" if self.drafter.architecture is Architecture.EAGLE1 else "eagle3"


_YARN = RopeConfig(
    type="yarn", partial_factor=0.5, factor=8.0, original_max_positions=32, mscale=1.0, mscale_all_dim=0.5
)
_LLAMA_3, _LLAMA_3_1 = EAGLE_3.config_for(LLAMA), EAGLE_3_1.config_for(LLAMA)
CASES = (
    Case(name="eagle3", target=LLAMA, drafter=_LLAMA_3),
    Case(name="eagle3.1", target=LLAMA, drafter=_LLAMA_3_1),
    Case(name="eagle1", target=LLAMA, drafter=EAGLE_1.config_for(LLAMA), train_steps=40),
    Case(name="norm-before-residual", target=LLAMA, drafter=replace(_LLAMA_3, norm_before_residual=True)),
    Case(name="norm-before-fc", target=LLAMA, drafter=replace(_LLAMA_3, norm_before_fc=True)),
    Case(name="reduced-vocabulary", target=LLAMA, drafter=replace(_LLAMA_3_1, draft_vocab_size=VOCAB_SIZE // 2)),
    Case(name="own-embedding", target=LLAMA, drafter=replace(_LLAMA_3_1, own_embedding=True)),
    Case(
        name="deep-four-aux-shared-head",
        target=LLAMA,
        drafter=replace(_LLAMA_3_1, num_layers=2, aux_layer_ids=(0, 2, 5, 8), num_aux_states=4, own_head=False),
    ),
    Case(
        name="speculators",
        target=LLAMA,
        drafter=replace(_LLAMA_3_1, norm_before_residual=True, draft_vocab_size=VOCAB_SIZE // 2),
        format="speculators",
    ),
    Case(name="window", target=LLAMA, drafter=replace(_LLAMA_3_1, sliding_windows=(12,))),
    Case(
        name="partial-yarn-mscale", target=LLAMA, drafter=EAGLE_3_1.config_for(LLAMA, layer=replace(_LAYER, rope=_YARN))
    ),
    Case(name="qwen3", target=QWEN3, drafter=EAGLE_3_1.config_for(QWEN3)),
    Case(name="qwen3-llama-style", target=QWEN3, drafter=EAGLE_3.config_for(QWEN3, layer=_LAYER)),
    Case(name="qwen3-speculators", target=QWEN3, drafter=EAGLE_3.config_for(QWEN3), format="speculators"),
    *(
        Case(
            name=name,
            target=target,
            drafter=replace(EAGLE_3_1.config_for(target), aux_layer_ids=_AUX_IDS),
            target_steps=150,
            train_steps=90,
            depths=(3,),
            block_size=block_size,
        )
        for name, target, block_size in (
            ("qwen3-moe", QWEN3_MOE, None),
            ("gpt-oss", GPT_OSS, None),
            ("llama4", LLAMA4, 32),  # or chunks must be multiples of 128
        )
    ),
)


@cache
def text() -> Tensor:
    return synthetic_text(VOCAB_SIZE, length=40_000, seed=1)


@dataclass(frozen=True, kw_only=True)
class PairDirectories:
    """Where a pair was written to."""

    target: Path
    drafter: Path


@cache
def _root() -> Path:
    return shared_directory("pairs")


def _directories(case: Case) -> PairDirectories:
    return PairDirectories(target=_root() / f"target-{case.target.family}", drafter=_root() / case.name)


def make_pairs(cases: Sequence[Case]) -> dict[str, PairDirectories]:
    """Train pairs in two processes, each target once for all its drafters. Who asks again gets the same, by name."""
    firsts = {case.target.family: case for case in cases}
    for shared in (_root, text):
        shared()  # before there are two
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(_make_target, firsts.values(), chunksize=1)
        pool.map(_make_drafter, cases, chunksize=1)
    return {case.name: _directories(case) for case in cases}


def _make_target(case: Case) -> None:
    directory = _directories(case).target
    if not directory.exists():
        budget = Budget(steps=case.target_steps, rate=4e-3)
        save_target(train_target(case.target, text(), budget), directory)


def _make_drafter(case: Case) -> None:
    directories = _directories(case)
    if not directories.drafter.exists():
        target = load_target(directories.target)
        budget = Budget(steps=case.train_steps, rate=3e-3)
        architecture = FAMILIES[case.target.family].architecture
        save_drafter(
            train_drafter(case.drafter, target, text(), budget, unroll=5),
            directories.drafter,
            to=case.format,
            target={"name_or_path": str(directories.target), "architectures": [architecture]},
        )
