"""prepare: what reaches training, what is held out, and what the key depends on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import ConfigError, DataError
from fledge.training.data.examples import TokenStore
from fledge.training.pipeline import Pipeline
from fledge.training.recipe import Recipe
from fledge.training.stages.prepare import STAGE
from tests.unit.training.data.stage_cases import make_recipe, read_lines, run_stage, save_tiny_target, write_lines
from tests.unit.training.data.templates import CHATML, LLAMA3, MISTRAL, chat


@pytest.fixture(name="target", scope="module")
def _target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("prepare") / "target")


def conversations(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "messages": chat(f"question {i}", f"answer {i}", system="be kind"),
            "category": "even" if i % 2 == 0 else "odd",
        }
        | more
        for i in range(count)
    ]


def contents(target: Path, store: TokenStore) -> list[str]:
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    return [tokenizer.decode(store.example(i)[0].tolist()) for i in range(len(store))]


def prepared(recipe: Recipe, directory: Path) -> tuple[dict[str, Any], TokenStore, list[dict[str, Any]]]:
    summary = run_stage(STAGE, recipe, directory)
    return summary, TokenStore(directory / "examples"), read_lines(directory / "held_out.jsonl")


def test_conversations_become_examples(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", conversations(6))
    summary, store, held_out = prepared(make_recipe(target, source), tmp_path / "p")
    assert held_out == []
    assert summary["examples"] == len(store) == 6
    assert summary["answer_tokens"] == store.answer_tokens == 6 * (len("answer 0") + 1)
    assert summary["categories"] == {"even": 3, "odd": 3}
    assert contents(target, store)[1].endswith("question 1<|im_end|>\n<|im_start|>assistant\nanswer 1<|im_end|>")


def test_prompts_teach_too_where_the_recipe_says_so(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", [*conversations(6), {"text": "abcdef"}])
    recipe = make_recipe(target, source, loss_on="all", min_answer_tokens=2)
    summary, store, _ = prepared(recipe, tmp_path / "p")
    plain = prepared(make_recipe(target, source, min_answer_tokens=2), tmp_path / "q")[1]
    assert store.tokens.tolist() == plain.tokens.tolist()
    for i in range(len(store)):
        answer = store.example(i)[1].tolist()
        assert answer == [False] + [True] * (len(answer) - 1)
    assert summary["answer_tokens"] == store.answer_tokens > plain.answer_tokens
    few = make_recipe(target, source, loss_on="all", min_answer_tokens=8)  # of answers, as ever
    assert prepared(few, tmp_path / "r")[0]["examples"] == 6
    assert STAGE.key(recipe, {}) != STAGE.key(make_recipe(target, source, min_answer_tokens=2), {})


def test_prompts_for_the_target_to_answer(target: Path, tmp_path: Path) -> None:
    asked = {"messages": chat("one", "two", "three")}
    source = write_lines(tmp_path / "data.jsonl", [asked, {"messages": chat("one", "two")}, {"text": "abcdef"}])
    summary = run_stage(STAGE, make_recipe(target, source, regenerate=True), tmp_path / "p")
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    first, second, third = read_lines(tmp_path / "p" / "prompts.jsonl")
    assert first["prompt_token_ids"] == encode_chat(tokenizer, asked["messages"])
    assert first["messages"] == asked["messages"]
    assert second["messages"] == chat("one")  # its answer is left to the target
    assert second["prompt_token_ids"] == encode_chat(tokenizer, chat("one"))
    assert tokenizer.decode(third["prompt_token_ids"]) == "abc"  # plain text: the first half
    assert (first["category"], first["template"]) == ("data", None)
    assert not (tmp_path / "p" / "examples").exists()
    assert summary["examples"] == 3


def test_the_same_recipe_gives_the_same_bytes_even_after_a_kill(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", conversations(40))
    recipe = make_recipe(target, source, held_out=6, max_examples=20)
    _, one, held_one = prepared(recipe, tmp_path / "1")
    leftover = tmp_path / "2" / ".examples.tmp"
    leftover.mkdir(parents=True)
    (leftover / "tokens.bin").write_bytes(b"half")
    (tmp_path / "2" / ".held_out.jsonl.tmp").write_text("half")
    _, two, held_two = prepared(recipe, tmp_path / "2")
    assert (one.digest, held_one) == (two.digest, held_two)
    other = replace(recipe, data=replace(recipe.data, seed=1))
    assert prepared(other, tmp_path / "3")[1].digest != one.digest


def test_held_out_prompts_and_their_duplicates_never_reach_training(target: Path, tmp_path: Path) -> None:
    records = conversations(30)
    # The same questions again, spaced otherwise and with other answers, in another file.
    again = [{"messages": chat(f"question  {i} ", "another answer", "and more", "yes")} for i in range(30)]
    sources = [write_lines(tmp_path / "a.jsonl", records), write_lines(tmp_path / "b.jsonl", again)]
    summary, store, held_out = prepared(make_recipe(target, *sources, held_out=10), tmp_path / "p")
    assert len(held_out) == 10
    assert {record["category"] for record in held_out} == {"even", "odd"}  # stratified
    questions = {record["messages"][1]["content"] for record in held_out}
    assert all(record["messages"][-1]["role"] == "user" for record in held_out)
    assert len(store) == 40
    assert summary["held_out_duplicates"] == 10
    for text in contents(target, store):
        asked = " ".join(text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0].split())
        assert asked not in questions
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    assert held_out[0]["prompt_token_ids"] == encode_chat(tokenizer, held_out[0]["messages"])


def test_held_out_does_not_depend_on_the_order_of_files(target: Path, tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", conversations(20))
    b = write_lines(tmp_path / "b.jsonl", [{"messages": chat(f"other {i}", "x")} for i in range(20)])
    chosen = [
        {json.dumps(r["messages"]) for r in prepared(make_recipe(target, *order, held_out=8), tmp_path / name)[2]}
        for name, order in (("ab", (a, b)), ("ba", (b, a)))
    ]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 8


def test_small_data_is_not_all_held_out(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", conversations(5))
    _, store, held_out = prepared(make_recipe(target, source, held_out=64), tmp_path / "p")
    assert (len(store), len(held_out)) == (3, 2)


def test_lengths_are_kept_and_counted(target: Path, tmp_path: Path) -> None:
    long = {"messages": chat("x", "y" * 300)}
    no_room = {"messages": chat("x" * 300, "yyy")}
    short = {"messages": chat("x", "y")}
    source = write_lines(tmp_path / "data.jsonl", [long, no_room, short])
    recipe = make_recipe(target, source, max_length=100, min_answer_tokens=3)
    summary, store, _ = prepared(recipe, tmp_path / "p")
    assert store.lengths.tolist() == [100]
    assert (summary["cut"], summary["too_long"], summary["too_short"]) == (2, 1, 1)


def test_bad_records_are_counted_and_only_bad_ones_are_an_error(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", [{"nothing": 1}, {"messages": chat("only a question")}])
    with pytest.raises(DataError, match=r"nothing to train on; the first of 2 skipped is data\.jsonl, line 1"):
        run_stage(STAGE, make_recipe(target, source), tmp_path / "p")
    write_lines(source, [{"nothing": 1}, *conversations(2)])
    summary = run_stage(STAGE, make_recipe(target, source), tmp_path / "p")
    assert summary["skipped"] == {"not a conversation": 1}
    assert summary["first_skipped"].startswith("data.jsonl, line 1: ")


def test_conversations_without_a_chat_template_are_refused_but_text_is_not(tmp_path: Path) -> None:
    bare = save_tiny_target(tmp_path / "bare", None)
    chats = write_lines(tmp_path / "chats.jsonl", conversations(2))
    with pytest.raises(DataError, match="no chat template"):
        run_stage(STAGE, make_recipe(bare, chats), tmp_path / "p")
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": f"some text {i}"} for i in range(4)])
    _, store, held_out = prepared(make_recipe(bare, texts, held_out=1), tmp_path / "p")
    assert len(store) == 3
    assert held_out[0]["prompt_token_ids"]


def test_augmentation_is_a_deterministic_share(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", conversations(200))
    template = tmp_path / "llama3.jinja"
    template.write_text(LLAMA3)
    recipe = make_recipe(
        target,
        source,
        templates=(str(template),),
        template_share=0.3,
        drop_system_share=0.25,
        system_prompts=("PIRATE",),
        vary_system_share=0.5,
    )
    summary, store, _ = prepared(recipe, tmp_path / "p")
    texts = contents(target, store)
    foreign = [text for text in texts if text.startswith("<s><|start|>")]
    assert len(foreign) == summary["other_template"]
    assert 0.15 < len(foreign) / 200 < 0.45
    assert sum("PIRATE" in text for text in texts) == summary["system_replaced"] > 30
    assert sum("be kind" not in text and "PIRATE" not in text for text in texts) == summary["system_dropped"] > 20
    assert prepared(recipe, tmp_path / "again")[1].digest == store.digest
    prompts = run_stage(STAGE, replace(recipe, regenerate=replace(recipe.regenerate, enabled=True)), tmp_path / "r")
    assert prompts["other_template"] == summary["other_template"]
    lines = read_lines(tmp_path / "r" / "prompts.jsonl")
    assert sum(line["template"] == 0 for line in lines) == summary["other_template"]


def test_a_template_that_refuses_gives_way_to_the_targets_own(target: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", conversations(10))
    template = tmp_path / "mistral.jinja"
    template.write_text(MISTRAL)  # takes no system prompt
    recipe = make_recipe(target, source, templates=(str(template),), template_share=1.0)
    summary, store, _ = prepared(recipe, tmp_path / "p")
    assert summary["refused_by_other_template"] == len(store) == 10
    assert "other_template" not in summary
    template.write_text("{% if %}")
    with pytest.raises(DataError, match=r"mistral\.jinja: cannot render"):
        run_stage(STAGE, recipe, tmp_path / "p")


def test_the_key_follows_data_tokenizer_and_template(tmp_path: Path) -> None:
    # Mistakes 9 and 10: whatever the tokens depend on makes another key.
    target = save_tiny_target(tmp_path / "target")
    source = write_lines(tmp_path / "data.jsonl", conversations(3))
    recipe = make_recipe(target, source)
    key = STAGE.key(recipe, {})
    assert STAGE.key(recipe, {}) == key
    (target / "chat_template.jinja").write_text(CHATML + " ")
    template_key = STAGE.key(recipe, {})
    write_lines(source, conversations(4))
    data_key = STAGE.key(recipe, {})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    stop_key = STAGE.key(recipe, {})
    assert len({key, template_key, data_key, stop_key}) == 4
    (tmp_path / "elsewhere").mkdir()
    moved = make_recipe(target, write_lines(tmp_path / "elsewhere" / "data.jsonl", conversations(4)))
    assert STAGE.key(moved, {}) == stop_key  # where the files are does not matter
    with pytest.raises(ConfigError, match=r"absent\.jsonl: cannot be read"):
        _ = Pipeline(make_recipe(target, tmp_path / "absent.jsonl"), stages=[STAGE]).keys
