"""Log-probabilities of prompts: those that the same tokens have when they are generated, whatever reads the prompt."""

import pytest
import torch

from fledge import LLM, SamplingParams
from fledge.errors import ConfigError
from fledge.layers.dense_cache import DenseCache
from tests.serving import make_llm

PROMPT = [7, 3, 50, 9, 100, 101, 7, 7, 3, 20, 21, 22]
GENERATED = 20


@pytest.fixture(name="llm", scope="module", params=[2048, 8, 1], ids=lambda size: f"chunks of {size}")
def _llm(request: pytest.FixtureRequest) -> LLM:
    return make_llm(max_num_batched_tokens=request.param)


@pytest.mark.parametrize("again", [False, True], ids=["first", "cached"])
def test_they_are_those_of_generation(llm: LLM, again: bool) -> None:
    (answer,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=GENERATED, logprobs=3, ignore_eos=True))
    made = answer.outputs[0]
    whole = [*PROMPT, *made.token_ids]
    asked = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)
    if again:
        llm.generate([whole], SamplingParams(max_tokens=1))
    plain = llm.generate([whole + whole], SamplingParams(max_tokens=2, temperature=0))  # nobody else is disturbed
    output, other = llm.generate([whole, whole + whole], [asked, SamplingParams(max_tokens=2, temperature=0)])
    found = output.prompt_logprobs
    assert found is not None
    assert [one.token for one in found] == whole
    assert found[0].logprob is None
    assert made.logprobs is not None
    for ours, theirs in zip(found[-GENERATED:], made.logprobs, strict=True):
        assert ours.rank == theirs.rank == 1
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.cached_tokens == 0
    assert other.outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert other.prompt_logprobs is None


def test_they_are_the_targets_own() -> None:
    llm = make_llm(speculative=False)
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0))
    tokens, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    with torch.inference_mode():
        states = llm.target(tokens, positions, DenseCache(llm.target.config.num_layers).extend(positions), ())
        expected = llm.target.logits(states.final).float().log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    found = output.prompt_logprobs or ()
    assert [one.logprob for one in found[1:]] == pytest.approx(expected.tolist(), abs=1e-4)
    assert [one.top for one in found] == [()] * len(PROMPT)
    assert len(output.outputs[0].token_ids) == 1


def test_nothing_is_generated_only_for_those_who_ask_of_the_prompt() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    for wrong in (-1, 21, True):
        with pytest.raises(ConfigError, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=wrong)
