"""Perturbations: names, what each changes and what it leaves alone, limits, and that only seed and id decide."""

import json
import random
from dataclasses import replace

import pytest

from fledge.drift.perturb import (
    KINDS,
    UNPERTURBED,
    PerturbationContext,
    chat_template,
    default_suite,
    distracting_paragraphs,
    parse_perturbation,
    perturb,
    texts,
)
from fledge.drift.prompts import ProbePrompt, Segment, load_probe_workload, segmented
from fledge.errors import ConfigError, PromptError
from tests.unit.drift.drift_cases import BOS, byte_tokenizer, conversation

TOKENIZER = byte_tokenizer()
CONTEXT = PerturbationContext(tokenizer=TOKENIZER, max_model_len=20_000, answer_tokens=50)
QUESTION = conversation("What is a heron?", system="You know birds.")


def applied(name: str, one: ProbePrompt = QUESTION, context: PerturbationContext = CONTEXT) -> ProbePrompt:
    return parse_perturbation(name).apply(one, context)


def length(one: ProbePrompt) -> int:
    return len(segmented(one, TOKENIZER).token_ids)


def contents(one: ProbePrompt) -> list[str]:
    return [message["content"] for message in one.messages]


def test_every_default_name_parses_to_itself_and_every_kind_is_in_a_suite():
    names, causes = default_suite("full"), default_suite("causes")
    assert [parse_perturbation(name).name for name in names] == list(names)
    assert len(set(names)) == len(names)
    parsed = {name: parse_perturbation(name) for name in causes}
    of_drafting = [name for name, one in parsed.items() if one.pins or one.noise]
    assert of_drafting == ["noise:0.5", "noise:1.0", "pin"]  # nothing that a prompt can do, so no part of "full"
    assert set(causes) - set(names) == set(of_drafting)
    assert {kind for name in (*names, *causes) for kind in parse_perturbation(name).kinds} == set(KINDS)
    assert set(default_suite("quick")) <= set(names)
    assert parse_perturbation("pad:4k").name == "pad:4k:before"
    assert parse_perturbation(UNPERTURBED).name == UNPERTURBED
    with pytest.raises(ConfigError, match=r"unknown suite 'ful'.*'full'"):
        default_suite("ful")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("templat:llama3", "Did you mean 'template:llama3'"),
        ("template:lama3", "Did you mean 'llama3'"),
        ("system:lnog", "Did you mean 'long'"),
        ("jsn", "Did you mean 'json'"),
        ("pad:1k:befor", "Did you mean 'before'"),
        ("pad:129k", "allowed is 1k to 128k"),
        ("pad:0k", "allowed is 1k to 128k"),
        ("pad:1000", "allowed is 1k to 128k"),
        ("template-noise:0", "above 0, up to 1"),
        ("template-noise:x", "above 0, up to 1"),
        ("temperature:nan", "above 0, up to 2"),
        ("noise:0", "above 0, up to 2"),
        ("pin:2", "too many parts"),
        ("bos:nun", "Write bos:none"),
        ("history:9", "1 to 8"),
        ("history:²", "1 to 8"),
        ("json:2", "too many parts"),
        ("system", "Write system:none"),
        ("template:", "Write template:chatml"),
        ("template:llama3+template:gemma", "'template' is given 2 times"),
        ("json+", "unknown perturbation ''"),
    ],
)
def test_bad_names_get_one_line_that_says_what_to_write(name, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        parse_perturbation(name)
    assert "\n" not in str(error.value)


def test_unperturbed_changes_nothing():
    assert applied(UNPERTURBED) == QUESTION


def test_template_changes_the_template_alone():
    after = applied("template:llama3")
    assert after.chat_template == chat_template("llama3")
    assert after.messages == QUESTION.messages


def test_system_prompts():
    question = {"role": "user", "content": "What is a heron?"}
    assert applied("system:none").messages == (question,)
    for which in ("short", "long", "out-of-domain", "other-language"):
        system, rest = applied(f"system:{which}").messages
        assert system["role"] == "system"
        assert system["content"] != "You know birds."
        assert rest == question
    assert length(applied("system:long")) > 10 * length(applied("system:short"))
    chosen = {contents(applied("system:other-language", conversation("Hm?", id=str(i))))[0] for i in range(40)}
    assert chosen == set(texts("insertions")["system"]["other-language"])


def test_history_comes_after_the_system_prompt_and_before_the_question():
    after = applied("history:4")
    assert [message["role"] for message in after.messages] == ["system", *["user", "assistant"] * 4, "user"]
    assert contents(after)[0] == "You know birds."
    assert contents(after)[-1] == "What is a heron?"
    assert len(set(contents(after))) == 10


def test_tools_json_and_switch_are_asked_for_in_the_right_turn():
    system, question = contents(applied("tools"))
    assert system.startswith("You know birds.\n\n")
    schemas = [json.loads(line) for line in system.splitlines() if line.startswith('{"name": "')]
    assert [schema["name"] for schema in schemas] == [tool["name"] for tool in texts("insertions")["tools"]]
    assert question == "What is a heron?"
    assert applied("tools", conversation("Hello")).messages[0]["role"] == "system"
    longer = conversation("First {one}", "Yes.", "And {text}?")
    assert contents(applied("json", longer))[:2] == ["First {one}", "Yes."]
    assert contents(applied("json", longer))[2].startswith("And {text}?\n\nGive your answer as one JSON object")
    assert contents(applied("switch:code-prose"))[1].startswith(
        "What is a heron?\n\nBegin your answer with a short Python"
    )


@pytest.mark.parametrize("side", ["before", "after"])
def test_padding_adds_about_what_it_says_on_the_side_it_says(side):
    after = applied(f"pad:4k:{side}")
    assert 4096 * 0.97 < length(after) - length(QUESTION) < 4096 + 150  # its wording comes on top
    question = contents(after)[1]
    assert question.endswith("What is a heron?") if side == "before" else question.startswith("What is a heron?")
    assert contents(after)[0] == "You know birds."


def test_padding_is_shortened_to_what_fits_and_refused_where_too_little_would_be_left():
    tight = PerturbationContext(tokenizer=TOKENIZER, max_model_len=4096, answer_tokens=300)
    assert 4096 - 300 - 100 < length(applied("pad:4k:before", context=tight)) <= 4096 - 300
    with pytest.raises(PromptError, match="8192 tokens of padding do not fit into 4096"):
        applied("pad:8k:before", context=tight)
    with pytest.raises(PromptError, match="4096 tokens of padding, the prompt and an answer of 2500 tokens"):
        applied("pad:4k", context=PerturbationContext(tokenizer=TOKENIZER, max_model_len=4096, answer_tokens=2500))


def test_long_distraction_does_not_repeat_itself():
    source = distracting_paragraphs(random.Random(0))
    paragraphs = [next(source) for _ in range(1500)]  # beyond 128k tokens
    assert len(set(paragraphs)) == len(paragraphs)
    assert not any("$" in paragraph for paragraph in paragraphs)


def test_noise_changes_template_tokens_and_nothing_else():
    before, after = segmented(QUESTION, TOKENIZER), segmented(applied("template-noise:0.5"), TOKENIZER)
    for segment in (Segment.SYSTEM, Segment.USER):
        kept = [
            [token for token, found in zip(one.token_ids, one.segments, strict=True) if found is segment]
            for one in (before, after)
        ]
        assert kept[0] == kept[1]
    assert after.token_ids != before.token_ids
    fresh = set(after.token_ids) - set(before.token_ids)
    assert fresh
    assert not fresh & set(TOKENIZER.all_special_ids)


def test_noise_has_the_rate_it_says():
    one = conversation("Hello?", "Yes.", *["And then?", "Nothing."] * 200, "Why?")
    template = Segment.TEMPLATE
    before, after = segmented(one, TOKENIZER), segmented(applied("template-noise:0.3", one), TOKENIZER)
    count = before.segments.count(template)
    # A third each: replaced, doubled, dropped. So the number stays, and 70 % of a token's runs survive whole.
    assert abs(after.segments.count(template) - count) < 0.05 * count
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    kept = before.token_ids.count(start)  # 0.7 whole, 0.1 doubled
    assert after.token_ids.count(start) == pytest.approx(kept * 0.9, rel=0.08)


def test_noise_leaves_the_begin_token_alone():
    for i in range(20):
        after = applied("template-noise:1.0", replace(QUESTION, id=str(i), chat_template=chat_template("alpaca")))
        assert after.token_ids[0] == TOKENIZER.convert_tokens_to_ids(BOS)


def test_without_a_begin_token_the_rest_stays_whatever_the_order():
    plain = segmented(applied("template:plain"), TOKENIZER)
    for name in ("template:plain+bos:none", "bos:none+template:plain"):
        bare = applied(name)
        assert (bare.token_ids, bare.segments) == (plain.token_ids[1:], plain.segments[1:])
    assert plain.token_ids[0] == TOKENIZER.convert_tokens_to_ids(BOS)
    with pytest.raises(PromptError, match="no begin-of-text token"):
        applied("bos:none")  # ChatML writes none


def test_composition_pads_and_noises_last_whatever_the_order():
    tight = PerturbationContext(tokenizer=TOKENIZER, max_model_len=6000, answer_tokens=100)
    name = "template-noise:0.2+pad:2k+template:alpaca+system:long"
    after = applied(name, context=tight)
    assert parse_perturbation(name).kinds == ("template-noise", "pad", "template", "system")
    text = TOKENIZER.decode(after.token_ids)
    assert texts("insertions")["system"]["long"][0] in text
    assert after.segments.count(Segment.USER) > 2000
    assert "<|im_start|>" not in text


def test_only_the_seed_the_name_and_the_id_decide():
    name = "system:out-of-domain+history:2+template-noise:0.3"
    assert applied(name) == applied(name)
    alone = contents(applied("history:2"))[1:3]
    assert contents(applied("system:short+history:2"))[1:3] == alone
    other = PerturbationContext(tokenizer=TOKENIZER, max_model_len=20_000, answer_tokens=50, seed=1)
    assert applied(name, context=other) != applied(name)
    several = [conversation("Hm?", id=str(i)) for i in range(4)]
    forward = perturb(parse_perturbation("history:2"), several, CONTEXT).prompts
    backward = perturb(parse_perturbation("history:2"), several[::-1], CONTEXT).prompts
    assert forward == backward[::-1]
    assert forward[0].messages != forward[1].messages


def test_prompts_that_do_not_fit_are_left_out_with_a_reason():
    context = PerturbationContext(tokenizer=TOKENIZER, max_model_len=300, answer_tokens=50)
    several = [conversation("Short?", id="short"), conversation("Long? " * 100, id="long")]
    found = perturb(parse_perturbation(UNPERTURBED), several, context)
    assert [one.id for one in found.prompts] == ["short"]
    assert found.left_out == {"long": "the prompt and an answer of 50 tokens do not fit into 300 tokens"}
    assert found.skip is None
    nothing = perturb(parse_perturbation("pad:1k"), several, context)
    assert nothing.prompts == ()
    assert nothing.skip == "1024 tokens of padding do not fit into 300 tokens"


def test_what_changes_nothing_is_skipped():
    several = [conversation("Hello?")]
    for name in ("system:none", "template:chatml"):  # there is no system prompt, and ChatML is the tokenizer's own
        assert perturb(parse_perturbation(name), several, CONTEXT).skip == "changes no prompt of this workload"
    assert perturb(parse_perturbation("system:none"), [QUESTION], CONTEXT).skip is None
    warm = perturb(parse_perturbation("temperature:0.7"), several, CONTEXT)
    assert (warm.skip, warm.prompts) == (None, tuple(several))
    assert parse_perturbation("temperature:0.7").temperature == 0.7
    drafting = parse_perturbation("noise:0.5+pin")
    assert (drafting.noise, drafting.pins) == (0.5, True)
    assert perturb(drafting, several, CONTEXT) == warm


def test_plain_text_and_ids_have_no_messages_to_change():
    text = ProbePrompt(id="t", category="", text="Once upon a time")
    ids = ProbePrompt(id="i", category="", token_ids=(1, 2, 3))
    for name in ("json", "template:gemma", "pad:1k", "system:short", "template-noise:0.5"):
        found = perturb(parse_perturbation(name), [text, ids], CONTEXT)
        assert found.skip
        assert set(found.left_out) == {"t", "i"}
    assert perturb(parse_perturbation("temperature:0.5"), [text, ids], CONTEXT).skip is None


@pytest.mark.parametrize("name", default_suite("full"))
def test_every_perturbation_of_the_suite_works_on_built_in_prompts(name):
    one = conversation(*(message["content"] for message in load_probe_workload("dialogue").prompts[0].messages))
    context = PerturbationContext(tokenizer=TOKENIZER, max_model_len=140_000, answer_tokens=64)
    if "pad:" in name and any(size in name for size in ("32k", "64k", "128k")):
        context = PerturbationContext(tokenizer=TOKENIZER, max_model_len=9000, answer_tokens=64)
    found = perturb(parse_perturbation(name), [one], context)
    if found.skip is None:
        assert length(found.prompts[0]) + 64 <= context.max_model_len
    else:
        without = ("template:chatml", "system:none", "bos:none")  # they change nothing here
        assert found.skip.endswith("do not fit into 9000 tokens") or name in without
