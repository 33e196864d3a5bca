"""English text that is on every machine with Python, and a tokenizer for it."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
# These models have never seen a conversation: a turn is a text to be continued.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"


def documentation(characters: int) -> list[str]:
    """Return paragraphs of prose from Python's documentation, about `characters` in all."""
    chosen: list[str] = []
    for paragraph in dict.fromkeys(_paragraphs()):  # some occur twice
        if sum(map(len, chosen)) >= characters:
            break
        chosen.append(paragraph)
    return chosen


def _paragraphs() -> Iterator[str]:
    """Paragraphs as one line each; examples, grammar, lists and headings are left out."""
    for text in _texts():
        for block in text.split("\n\n"):
            paragraph = " ".join(block.replace("-\n", "-").split())
            if block[:1].isupper() and block.isascii() and 100 < len(paragraph) < 400 and paragraph.endswith("."):
                yield paragraph


def _texts() -> list[str]:
    """What `help()` knows about the language, the short topics first; docstrings where Python comes without it."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - some distributions leave it out
    except ImportError:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        return [ast.get_docstring(ast.parse(file.read_bytes())) or "" for file in files]
    return [topics[name] for name in sorted(topics, key=lambda name: (len(topics[name]), name))]


def train_tokenizer(paragraphs: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, with a chat template, in the form that Hugging Face directories hold."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast
