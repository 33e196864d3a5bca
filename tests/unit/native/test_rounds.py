"""The engine in float32 on a CPU, where the layers are C: the tokens and drafts of torch, and rounds that agree with
themselves to the last bit.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from fledge.decoding.drafting import TreeShape
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.native.decoder import NativeTarget
from fledge.native.drafter import NativeDrafter
from fledge.native.library import library
from tests.engine_cases import TREE, Ask, answers, greedy, sampled, speculation, verify_share
from tests.tiny_models import TARGET_CONFIGS, TINY_TARGET, drafter_configs, make_drafter, make_target

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")
PROMPTS = ([3, 5, 7], list(range(2, 38)), [9] * 20, [1, 2] * 7)
DRAFTERS = drafter_configs()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """What, when called, makes torch do everything until the end of the test."""

    def switch_off() -> None:
        monkeypatch.setenv("FLEDGE_NATIVE", "0")
        library.cache_clear()
        assert library() is None

    yield switch_off
    monkeypatch.undo()
    library.cache_clear()
    library()  # from the cache of this machine, not from one of the next test's own, where it would be compiled anew


def make_engine(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    even_head: bool = False,
    tree: TreeShape | None = None,
    sample_drafts: bool = False,
    share: float | None = None,
    **settings: object,
) -> LLMEngine:
    """`even_head`: all tokens are liked almost equally, so that rounding decides between them.

    `share`: of the drafts of a round, that are verified.
    """
    model = make_target(target)
    if even_head:
        model.lm_head.weight.copy_(model.lm_head.weight[0] + 3e-7 * torch.randn_like(model.lm_head.weight))
    drafts = None if drafter is None else make_drafter(drafter, model, seed=2)
    made = None if drafter is None else speculation(3, tree=tree, sample_drafts=sample_drafts)
    config = EngineConfig(max_model_len=128, max_num_seqs=4, num_blocks=100, speculative_config=made, **settings)
    engine = LLMEngine(model, drafts, config)
    if share is not None:
        verify_share(engine, share)
    return engine


def watched(engine: LLMEngine, asks: list[Ask]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return the answers, and the drafts that lay there after each step."""
    requests = [ask.submit(engine, str(i)) for i, ask in enumerate(asks)]
    drafts = []
    while engine.has_unfinished:
        engine.step()
        drafts.append(engine.runner.state.drafts.tolist())
    assert engine.stats().drafter_failure is None
    return [request.output for request in requests], drafts


ASKS = [greedy(prompt, max_tokens=12) for prompt in PROMPTS]
LONG_ASKS = [greedy(prompt, max_tokens=25) for prompt in PROMPTS]


NOT_LOWERED = ("mixtral", "qwen3-moe", "olmo2", "gemma3", "gpt-oss", "glm", "glm4", "glm4-moe", "qwen2-moe")
NOT_LOWERED += ("olmo3", "minimax-m2", "glm4-moe-lite", "ministral3")
NOT_LOWERED += ("deepseek-v2", "deepseek-v3", "kimi-k2", "llama4", "ernie4.5", "ernie4.5-moe", "gemma2")
NOT_LOWERED += ("exaone4", "exaone4-no-window", "olmoe", "dots1")


@pytest.mark.parametrize("name", TARGET_CONFIGS)
def test_every_target_answers_as_by_torch(name: str, without_native: Callable[[], None]) -> None:
    drafter = drafter_configs(TARGET_CONFIGS[name])["eagle3.1"]
    native = make_engine(TARGET_CONFIGS[name], drafter)
    assert isinstance(native.runner.state.target, NativeTarget) == (name not in NOT_LOWERED)
    found = watched(native, ASKS)
    assert found[0] == answers(make_engine(TARGET_CONFIGS[name], None), ASKS), "and as without speculation"
    without_native()
    by_torch = make_engine(TARGET_CONFIGS[name], drafter)
    assert not isinstance(by_torch.runner.state.target, NativeTarget)
    assert found == watched(by_torch, ASKS)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_drafts_as_by_torch(name: str, without_native: Callable[[], None]) -> None:
    native = make_engine(TINY_TARGET, DRAFTERS[name])
    assert isinstance(native.runner.state.drafter, NativeDrafter) == (name != "latent")
    found = watched(native, ASKS)
    without_native()
    assert found == watched(make_engine(TINY_TARGET, DRAFTERS[name]), ASKS)


def test_a_head_that_is_the_targets_has_its_factor(without_native: Callable[[], None]) -> None:
    """Granite's. The C drafter knows of none, and so is not there."""
    config = TARGET_CONFIGS["granite"]
    native = make_engine(config, drafter_configs(config)["eagle1"])
    target, drafter = native.runner.state.target, native.runner.state.drafter
    assert isinstance(target, NativeTarget)
    assert drafter is not None
    assert not isinstance(drafter, NativeDrafter)
    states = torch.randn(3, config.hidden_size)
    torch.testing.assert_close(drafter.logits(states), target.logits(states))
    torch.testing.assert_close(target.logits(states), target.lm_head(states) / config.logits_scaling)
    found = watched(native, ASKS)
    without_native()
    assert found == watched(make_engine(config, drafter_configs(config)["eagle1"]), ASKS)


@pytest.mark.parametrize("settings", [{"tree": TREE}, {"sample_drafts": True}, {"max_num_batched_tokens": 10}])
def test_trees_samples_and_chunks_are_as_by_torch(settings: dict[str, object], without_native: Callable) -> None:
    asks = [*ASKS[:2], *(sampled(prompt, max_tokens=12, seed=i) for i, prompt in enumerate(PROMPTS[2:]))]
    found = watched(make_engine(TINY_TARGET, DRAFTERS["eagle3.1"], **settings), asks)
    without_native()
    assert found == watched(make_engine(TINY_TARGET, DRAFTERS["eagle3.1"], **settings), asks)


def test_rounding_never_tells_speculation_from_plain_decoding() -> None:
    """All logits are within rounding of each other: whatever sums in another order chooses other tokens.

    Trees do: their nodes are summed in the order in which they lie, not in that of the path.
    """
    torch.manual_seed(0)
    plain = answers(make_engine(TINY_TARGET, None, even_head=True), LONG_ASKS)
    assert len({token for answer in plain for token in answer}) > 5
    for drafter, settings in (
        (None, {"max_num_batched_tokens": 7}),
        ("eagle3.1", {}),
        ("eagle1", {}),
        ("eagle3.1", {"share": 0.5}),
    ):
        for together in (True, False):
            torch.manual_seed(0)
            engine = make_engine(TINY_TARGET, drafter and DRAFTERS[drafter], even_head=True, **settings)
            found = answers(engine, LONG_ASKS) if together else [answers(engine, [ask])[0] for ask in LONG_ASKS]
            assert found == plain, (drafter, settings, together)
