"""Structured output on a whole engine with speculation on: always valid, and the tokens of masked decoding."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge import LLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.engine.constraint import ConstraintFactory
from fledge.models.drafter.variants import EAGLE_3_1
from fledge.server.structured import GrammarCompiler, call_grammar, read_format, read_tools
from fledge.server.tool_parsers import TOOL_PARSERS
from tests.parsing import parse_whole
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=120)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "caterpillar", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}
EXPRESSION = re.compile(r"[a-f]{3}-[0-9]{2,4}(;x+y)?")


def is_animal(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["name", "age", "kind"] and found["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("pair")
    # Two ids more than the tokenizer has: padding, as in many released models.
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE + 2, eos_ids=(VOCAB_SIZE - 1,))
    target = make_target(config)
    save_target(target, root / "target")
    save_drafter(make_drafter(EAGLE_3_1.config_for(config), target), root / "drafter")
    save_tokenizer(root / "target")
    return root


def load(pair: Path, **speculation: Any) -> LLM:
    config = {"model": str(pair / "drafter"), "adaptive": False, **speculation} if speculation else None
    return LLM(pair / "target", device="cpu", kv_cache_bytes=2**24, speculative_config=config)


def compiler_of(llm: LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.tokenizer, vocab_size=llm.target.config.vocab_size, eos_ids=llm.eos_ids)


CASES: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, is_animal),
    ({"guided_regex": EXPRESSION.pattern}, EXPRESSION.fullmatch),
    ({"guided_choice": ["yes", "yesterday", "no"]}, lambda text: text in ("yes", "yesterday", "no")),
    ({"guided_grammar": 'start: item ("," item){2}\nitem: /[0-9]/ | "(" start ")"'},
     re.compile(r"[0-9(),]+").fullmatch),
]  # fmt: skip


@pytest.fixture(name="plain", scope="module")
def _plain(pair: Path) -> LLM:
    return load(pair)


def factories(compiler: GrammarCompiler) -> list[ConstraintFactory]:
    grammars = [read_format(**fields) for fields, _ in CASES]
    return [compiler.compile(grammar) for grammar in grammars if grammar is not None]


SPECULATION = [
    {"num_speculative_tokens": 4},
    {"num_speculative_tokens": 3, "tree_width": 3, "tree_budget": 8},
    {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
]


@pytest.mark.parametrize("speculation", SPECULATION, ids=["chain", "tree", "sampled drafts"])
def test_greedy_answers_are_valid_and_those_without_speculation(
    pair: Path, plain: LLM, speculation: dict[str, Any]
) -> None:
    """In one batch with requests that have no grammar, which must not notice."""
    prompts: list[Any] = [f"prompt {i}" for i in range(2 * len(CASES))]
    llm = load(pair, **speculation)
    outputs = {}
    for engine in (plain, llm):
        made = factories(compiler_of(engine))
        constraints = [one for factory in made for one in (factory, None)]
        outputs[engine] = [o.outputs[0] for o in engine.generate(prompts, GREEDY, constraint=constraints)]
    assert [o.token_ids for o in outputs[llm]] == [o.token_ids for o in outputs[plain]]
    for (_, check), output in zip(CASES, outputs[llm][::2], strict=True):
        assert output.finish_reason == "stop"
        assert check(output.text), output.text
    free = plain.generate(prompts[1::2], GREEDY)
    assert [o.token_ids for o in outputs[llm][1::2]] == [o.outputs[0].token_ids for o in free]
    assert llm.engine.stats().acceptance.rounds > 20
    assert llm.engine.block_manager.used == 0


@pytest.mark.parametrize("speculation", SPECULATION, ids=["chain", "tree", "sampled drafts"])
def test_sampled_answers_are_valid_and_follow_from_their_seeds(
    pair: Path, plain: LLM, speculation: dict[str, Any]
) -> None:
    llm = load(pair, **speculation)
    params = [SamplingParams(temperature=1.5, seed=i, max_tokens=150, n=2) for i in range(len(CASES))]
    prompts = ["hello"] * len(CASES)
    texts = []
    for engine in (plain, llm, llm):
        outputs = engine.generate(prompts, params, constraint=factories(compiler_of(engine)))
        texts.append([answer.text for output in outputs for answer in output.outputs])
        for (_, check), output in zip(CASES, outputs, strict=True):
            for answer in output.outputs:
                assert answer.finish_reason == "length" or check(answer.text), answer.text
    assert texts[1] == texts[2]
    if speculation.get("draft_sample_method") is None:  # drafts that involve no chance leave sampled tokens as they are
        assert texts[0] == texts[1]


def test_forced_calls_are_read_back(pair: Path) -> None:
    llm = load(pair, num_speculative_tokens=4)
    compiler = compiler_of(llm)
    asked = read_tools([{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}], "required", False)
    assert asked is not None
    for syntax in ("hermes", "llama3_json", "kimi_k2"):
        parser = TOOL_PARSERS[syntax]
        grammar = call_grammar(parser, asked)
        assert grammar is not None
        output = llm.generate("x", replace(GREEDY, max_tokens=400), constraint=compiler.compile(grammar))
        content, calls = parse_whole(parser(), output[0].outputs[0].text)
        assert content is None
        ((name, arguments),) = calls
        assert name == "find"
        assert is_animal(arguments)


def test_limits_cut_and_stops_end_as_ever(plain: LLM) -> None:
    """A constraint does not keep an answer from being too long, nor from its own stop strings and ids."""
    factory = factories(compiler_of(plain))[0]
    cut = plain.generate("hello", replace(GREEDY, max_tokens=9), constraint=factory)[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ('{"name":"', "length")
    stopped = plain.generate("hello", replace(GREEDY, stop=["name"]), constraint=factory)[0].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ('{"', "stop", "name")
    ignoring = plain.generate("hello", replace(GREEDY, ignore_eos=True, min_tokens=100), constraint=factory)
    assert ignoring[0].outputs[0].finish_reason == "stop"
    assert is_animal(ignoring[0].outputs[0].text)


def test_the_token_that_ends_an_answer_is_no_text(plain: LLM) -> None:
    """Parsers read text with its special tokens in it; the end of text is not for them."""
    ending = replace(GREEDY, logit_bias={VOCAB_SIZE - 1: 1000.0}, skip_special_tokens=False)
    (end,) = plain.generate("hello", ending)[0].outputs
    assert (end.text, len(end.token_ids), end.finish_reason) == ("", 1, "stop")
    (shown,) = plain.generate("hello", replace(ending, include_stop_str_in_output=True))[0].outputs
    assert shown.text == "<|end|>"
