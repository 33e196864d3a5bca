"""Small chat templates in the styles of the field, and a byte-level tokenizer that knows their special tokens."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|eot|>", "<|start|>", "<|stop|>", "<s>", "</s>", "[INST]", "[/INST]")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"  # Jinja drops a line break after a tag
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<s>{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# As Mistral's: the system prompt goes into the last user turn, so that a later turn rewrites the earlier ones.
MOVING_SYSTEM = (
    "<s>{% set ns = namespace(system='', last=0) %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content + ' ' %}"
    "{% elif m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{% if loop.index0 == ns.last %}{{ ns.system }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# The generation prompt opens the thinking; thinking of turns before the last user turn is dropped.
THINK = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# The same, and finished turns never show their thinking: a turn as rendered does not begin with its prompt.
THINK_ALWAYS_DROPPED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# No special token between prompt and answer: the tokenizer may merge across.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Q:{{ m.content }}A:"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def make_tokenizer(template: str | None = CHATML, *, eos: str = "<|im_end|>", merges: tuple[str, ...] = ()) -> Any:
    """Byte-level BPE. Each of `merges` is two characters that become one token, like ":a"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    for merge in merges:
        vocab[merge] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(merge[0], merge[1]) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, extra_special_tokens=list(SPECIALS))
    fast.chat_template = template
    return fast


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
