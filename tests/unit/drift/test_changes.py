"""The template families: what each writes, and what a tokenizer makes of markers it does not know."""

import pytest

from fledge.drift.perturb import FAMILIES, chat_template
from fledge.drift.prompts import ProbePrompt, Segment, segmented
from tests.unit.drift.drift_cases import BOS, byte_tokenizer

DIALOGUE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
)
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. "
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"

# DeepSeek's markers: a fullwidth bar, and a block for each space.
USER, ASSISTANT, END = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nYes."
        "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama3": (
        f"{BOS}<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral": f"{BOS}[INST] Be brief.\n\nHello? [/INST] Yes.</s>[INST] Why? [/INST]",
    "gemma": (
        f"{BOS}<start_of_turn>user\nBe brief.\n\nHello?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "alpaca": (
        f"{BOS}Be brief.\n\n### Instruction:\nHello?\n\n### Response:\nYes.</s>\n\n"
        "### Instruction:\nWhy?\n\n### Response:\n"
    ),
    "vicuna": f"{BOS}Be brief. USER: Hello? ASSISTANT: Yes.</s>USER: Why? ASSISTANT:",
    "deepseek": f"{BOS}Be brief.{USER}Hello?{ASSISTANT}Yes.{END}{USER}Why?{ASSISTANT}",
    "kimi": (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hello?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>Yes.<|im_end|><|im_user|>user<|im_middle|>Why?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    ),
    "plain": f"{BOS}Be brief.\n\nHello?\n\nYes.\n\nWhy?\n\n",
}  # fmt: skip
WITHOUT_SYSTEM = {
    "mistral": f"{BOS}[INST] Why? [/INST]",
    "gemma": f"{BOS}<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
    "alpaca": f"{BOS}{ALPACA}### Instruction:\nWhy?\n\n### Response:\n",
    "vicuna": f"{BOS}{VICUNA}USER: Why? ASSISTANT:",
    "deepseek": f"{BOS}{USER}Why?{ASSISTANT}",
    "plain": f"{BOS}Why?\n\n",
}


def written(family):
    prompt = ProbePrompt(id="x", category="", messages=DIALOGUE, chat_template=chat_template(family))
    return segmented(prompt, byte_tokenizer())


def render(messages, family, *, tokenizer=None, prompt=True):
    return (tokenizer or byte_tokenizer()).apply_chat_template(
        list(messages), chat_template=chat_template(family), add_generation_prompt=prompt, tokenize=False
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_writes_a_dialogue_in_the_familys_format(family):
    assert render(DIALOGUE, family) == EXPECTED[family]


@pytest.mark.parametrize("family", WITHOUT_SYSTEM)
def test_without_a_system_prompt(family):
    assert render(DIALOGUE[3:], family) == WITHOUT_SYSTEM[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_generation_prompt_is_all_that_an_unfinished_rendering_lacks(family):
    asked, bare = render(DIALOGUE, family), render(DIALOGUE, family, prompt=False)
    assert asked.startswith(bare)
    assert (asked == bare) == (family == "mistral")  # [/INST] ends the question already


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_bos_token_nothing_stands_in_for_it(family):
    text = render(DIALOGUE, family, tokenizer=byte_tokenizer(bos=False))
    assert text == EXPECTED[family].removeprefix(BOS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_is_found_in_the_rendering(family):
    prompt = written(family)
    for segment, text in (
        (Segment.SYSTEM, "Be brief."),
        (Segment.USER, "Hello?Why?"),
        (Segment.ASSISTANT, "Yes."),
    ):
        ids = [token for token, found in zip(prompt.token_ids, prompt.segments, strict=True) if found is segment]
        assert byte_tokenizer().decode(ids) == text


def test_foreign_markers_are_text_and_known_ones_are_tokens():
    tokenizer = byte_tokenizer()
    known = tokenizer.convert_tokens_to_ids("<|im_start|>")
    chatml, llama = (written(family).token_ids for family in ("chatml", "llama3"))
    assert chatml.count(known) == 5
    assert known not in llama
    assert len(llama) == len(EXPECTED["llama3"].removeprefix(BOS)) + 1  # a byte each, and the bos token
