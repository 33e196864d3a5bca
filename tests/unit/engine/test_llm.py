"""The offline API on a tiny byte-level pair: what goes in, what comes out, what is refused."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from fledge import LLM, AsyncLLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.errors import CheckpointError, ConfigError, PromptError, SwapRefusedError
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3_1
from fledge.native.drafter import NativeDrafter
from fledge.native.library import library
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("pair")
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    target = make_target(config)
    save_target(target, root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), target), root / "eagle3.1")
    save_drafter(make_drafter(EAGLE_1.config_for(config), target), root / "eagle1")
    save_target(target, root / "no-tokenizer")
    save_tokenizer(root / "target")
    return root


@pytest.fixture(name="plain", scope="module")
def _plain(pair: Path) -> LLM:
    return LLM(pair / "target")


def speculative(pair: Path, **more: object) -> LLM:
    return LLM(pair / "target", speculative_config={"model": str(pair / "eagle3.1"), **more})


def test_generate_gives_vllms_shape_and_the_same_tokens_with_and_without_drafter(pair: Path, plain: LLM) -> None:
    prompts = ["Hello", "another prompt", {"prompt_token_ids": [1, 2, 3]}]
    expected = plain.generate(prompts, GREEDY)
    assert [output.prompt for output in expected] == ["Hello", "another prompt", None]
    assert expected[0].metrics.acceptance.acceptance_length is None
    for options in ({"num_speculative_tokens": 4}, {"tree_width": 3, "tree_budget": 8}, {"method": "eagle3"}):
        outputs = speculative(pair, **options).generate(prompts, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
        assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]
        assert outputs[0].metrics.acceptance.rounds > 0


def test_a_drafter_is_swapped_in_the_middle_of_a_stream(pair: Path, plain: LLM) -> None:
    (expected,) = plain.generate("Hello", GREEDY)
    llm = speculative(pair, adaptive=False)
    for name in ("eagle1", "eagle3.1"):
        stream = llm.stream("Hello", GREEDY)
        found = list(next(stream).token_ids)
        with pytest.raises(CheckpointError, match="no such directory"):
            llm.swap_drafter(pair / "nothing")
        llm.swap_drafter(pair / name)
        assert [*found, *(token for event in stream for token in event.token_ids)] == list(
            expected.outputs[0].token_ids
        )
        assert llm.config.drafter == llm.engine.info.drafter == str(pair / name)
        running = llm._own_engine.runner.state.drafter
        assert isinstance(running, NativeDrafter) == (library() is not None), "packed and lowered, as at a start"

    async def swap() -> None:
        engine = AsyncLLM(llm)
        answer = engine.generate("Hello", GREEDY)
        await anext(answer)
        await engine.swap_drafter(pair / "eagle1")
        last = [output async for output in answer][-1]
        assert last.outputs[0].token_ids == expected.outputs[0].token_ids
        with pytest.raises(CheckpointError):
            await engine.swap_drafter(pair / "target")
        engine.shutdown()
        with pytest.raises(ConfigError, match="shut down"):
            await engine.swap_drafter(pair / "eagle1")

    asyncio.run(swap())
    assert llm.config.drafter == str(pair / "eagle1")
    with pytest.raises(SwapRefusedError, match="started without one"):
        plain.swap_drafter(pair / "eagle1")


def test_drafters_are_exchanged_on_a_loaded_target(pair: Path, plain: LLM) -> None:
    expected = plain.generate(["Hello", "more"], GREEDY)
    llm = LLM(pair / "target")
    target = llm.target
    for name, depth in (("eagle3.1", 4), ("eagle3.1", 1), ("eagle1", 3), (None, 0)):
        speculation = {"model": str(pair / (name or "")), "num_speculative_tokens": depth, "adaptive": False}
        llm.set_speculation(None if name is None else speculation)
        outputs = llm.generate(["Hello", "more"], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
        assert max(o.metrics.acceptance.depth for o in outputs) == depth
        assert llm.target is target
    llm.set_speculation({"model": str(pair / "eagle3.1"), "num_speculative_tokens": 2})
    with pytest.raises(CheckpointError):
        llm.set_speculation({"model": str(pair / "target")})
    (alone,) = llm.generate("Hello", GREEDY)
    assert alone.metrics.acceptance.rounds == 0
    assert alone.outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_one_prompt_need_not_be_in_a_list(plain: LLM) -> None:
    assert len(plain.generate("Hello", GREEDY)) == 1
    assert len(plain.generate([5, 6, 7], GREEDY)) == 1
    assert len(plain.generate([[5, 6, 7], [8]], GREEDY)) == 2


def test_seeds_make_sampling_repeatable_and_requests_differ_without(pair: Path, plain: LLM) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=16, seed=7)
    first = plain.generate(["a"], hot)[0].outputs[0].token_ids
    assert speculative(pair).generate(["zzz", "a"], hot)[1].outputs[0].token_ids == first
    free = SamplingParams(temperature=1.5, max_tokens=16)
    one, two = plain.generate(["a", "a"], free)
    assert one.outputs[0].token_ids != two.outputs[0].token_ids
    again = LLM(pair / "target", seed=3).generate(["a", "a"], free)
    assert [o.outputs[0].token_ids for o in LLM(pair / "target", seed=3).generate(["a", "a"], free)] == [
        o.outputs[0].token_ids for o in again
    ]


def test_chat_goes_through_the_template(plain: LLM) -> None:
    output = plain.chat([{"role": "user", "content": "hi"}], GREEDY)[0]
    assert plain.tokenizer.decode(output.prompt_token_ids) == "<user>hi\n<assistant>"
    assert len(plain.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], GREEDY)) == 2


def test_stop_ids_and_stop_strings_end_the_answer(pair: Path, plain: LLM) -> None:
    free = plain.generate("Hello", GREEDY)[0].outputs[0]
    stop_id = free.token_ids[9]
    first = free.token_ids.index(stop_id)
    for llm in (plain, speculative(pair, num_speculative_tokens=5)):
        by_id = llm.generate("Hello", replace(GREEDY, stop_token_ids=[stop_id]))[0].outputs[0]
        assert by_id.token_ids == free.token_ids[: first + 1]
        assert (by_id.finish_reason, by_id.stop_reason) == ("stop", stop_id)
        eos = llm.generate("Hello", replace(GREEDY, logit_bias={VOCAB_SIZE - 1: 1000.0}))[0].outputs[0]
        assert (eos.token_ids, eos.finish_reason, eos.stop_reason) == ((VOCAB_SIZE - 1,), "stop", None)
        held = llm.generate("Hello", replace(GREEDY, logit_bias={VOCAB_SIZE - 1: 1000.0}, min_tokens=5))[0].outputs[0]
        assert len(held.token_ids) == 6
        assert free.finish_reason == "length"


def test_a_stop_string_is_found_across_rounds(pair: Path, plain: LLM) -> None:
    text = plain.generate("Hello", GREEDY)[0].outputs[0].text
    stop = text[5:9]
    for llm in (plain, speculative(pair, num_speculative_tokens=5)):
        answer = llm.generate("Hello", replace(GREEDY, stop=[stop]))[0].outputs[0]
        assert answer.text == text[: text.index(stop)]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_streamed_pieces_add_up_to_the_text(pair: Path) -> None:
    llm = speculative(pair)
    events = list(llm.stream("Hello", GREEDY))
    output = events[-1].output
    assert output is not None
    assert all(event.output is None for event in events[:-1])
    assert "".join(piece.text for event in events for piece in event.pieces) == output.outputs[0].text
    assert sum((event.token_ids for event in events), ()) == output.outputs[0].token_ids


def test_the_answer_ends_at_the_models_length(pair: Path) -> None:
    for config in (None, {"model": str(pair / "eagle3.1"), "num_speculative_tokens": 5}):
        llm = LLM(pair / "target", max_model_len=20, speculative_config=config)
        output = llm.generate([[3] * 10], replace(GREEDY, max_tokens=None, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 10
        assert output.outputs[0].finish_reason == "length"


def test_no_drafting_beyond_the_drafters_own_length(pair: Path) -> None:
    outputs = speculative(pair, max_model_len=16).generate([[3] * 10], replace(GREEDY, ignore_eos=True))
    assert outputs[0].metrics.acceptance.rounds <= 5
    assert len(outputs[0].outputs[0].token_ids) == 24


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([VOCAB_SIZE], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1] * 256, "the prompt has 256 tokens"),
        ({"text": "a"}, "expected 'prompt'"),
        ([[1.5]], "expected text or a list of token ids"),
        (b"a", "found bytes, expected text or a list of token ids"),
    ],
)
def test_bad_prompts(plain: LLM, prompt: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        plain.generate([prompt], GREEDY)  # type: ignore[list-item]


def test_misspelt_names_get_a_suggestion(pair: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'temperature'"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean 'speculative_config'"):
        LLM(pair / "target", speculative_conf={})  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean 'method'"):
        speculative(pair, methd="eagle3")


def test_what_cannot_be_loaded_says_why(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory, and not a Hugging Face name"):
        LLM(tmp_path / "nowhere" / "deep")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        LLM("someone/some-model")
    with pytest.raises(ConfigError, match="dtype"):
        LLM(pair / "target", dtype="int4")
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(pair / "target", max_model_len=100000)
    with pytest.raises(ConfigError, match="is a drafter for method 'eagle'"):
        LLM(pair / "target", speculative_config={"model": str(pair / "eagle1"), "method": "eagle3"})


def test_a_target_without_tokenizer_takes_token_ids(pair: Path) -> None:
    llm = LLM(pair / "no-tokenizer")
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids) == 24
    with pytest.raises(PromptError, match="needs a tokenizer"):
        llm.generate("Hello", GREEDY)
