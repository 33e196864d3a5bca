"""Trains the byte-level BPE tokenizer of the bundled models and saves it as a Hugging Face directory.

The sample is balanced by group and taken in file order, so the same files give the same tokenizer.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.demo import jsonlines

VOCABULARY = 8192
MODEL_MAX_LENGTH = 4096
BEGIN, END, TURN_START, TURN_END = "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [BEGIN, END, TURN_START, TURN_END, *(f"<|reserved_{i}|>" for i in range(12))]
ROLES = ("system", "user", "assistant", "tool")

# As Llama 3 splits, but every digit alone: a small model learns arithmetic on digits, not on groups of three.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Without tools it renders what the models were trained on; tools and calls are written as Hermes and Qwen do.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages and messages[0]['role'] == 'system' %}"
    "{{- (messages[0]['content'] or '') + '\\n\\n' }}{%- set messages = messages[1:] %}"
    "{%- endif %}"
    "{{- '# Tools\\n\\nYou may call these functions:\\n<tools>\\n' }}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}"
    "{{- '</tools>\\n\\nTo call one, write its name and its arguments as JSON between tags:\\n<tool_call>\\n' }}"
    "{{- '{\"name\": \"NAME\", \"arguments\": {...}}\\n</tool_call><|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('unknown role: ' ~ message['role']) }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}"
    "{{- message['content'] or '' }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '\\n' if message['content'] or not loop.first }}"
    "{{- '<tool_call>\\n{\"name\": ' + (call.function.name | tojson) + ', \"arguments\": ' }}"
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>' }}"
    "{%- endgeneration %}"
    "{%- else %}"
    "{{- (message['content'] or '') + '<|im_end|>' }}"
    "{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# MB of text per group in the training sample.
SAMPLE_MB = {"docs": 26, "prose": 13, "instructions": 16, "math": 8, "dialogue": 7, "code": 18, "chat": 12}


def group_of(path: Path) -> str:
    """The group of a data file: `docs-01.jsonl.xz` is docs, `chat/anything` is chat."""
    return "chat" if path.parent.name == "chat" else path.name.split("-")[0]


def texts_of(record: jsonlines.Record) -> list[str]:
    return [m["content"] for m in record["messages"]] if "messages" in record else [record["text"]]


def sample(files: list[Path], megabytes: dict[str, float]) -> Iterator[str]:
    """Yield texts, each group's quota spread evenly over its files."""
    groups: defaultdict[str, list[Path]] = defaultdict(list)
    for path in files:
        groups[group_of(path)].append(path)
    for group, paths in sorted(groups.items()):
        for path in paths:
            left = megabytes.get(group, 0) * 1e6 / len(paths)
            for record in jsonlines.read(path):
                if left <= 0:
                    break
                for text in texts_of(record):
                    left -= len(text)
                    yield text


def train(texts: Iterator[str], vocabulary: int = VOCABULARY, progress: bool = False) -> Tokenizer:
    """Return a byte-level BPE of exactly `vocabulary` entries, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        jsonlines.fail(f"the sample is too small for {vocabulary} tokens: it gave {tokenizer.get_vocab_size()}")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the directory that `AutoTokenizer` loads."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=TURN_END,
        pad_token=END,
        additional_special_tokens=[TURN_START],
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # transformers 5 writes a class name that version 4 does not know; both know this one.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def bytes_per_token(tokenizer: Any, files: list[Path], megabytes: float = 1.0) -> dict[str, float]:
    """Bytes per token by source, over the last texts read of each file's first few MB."""
    read: defaultdict[str, list[str]] = defaultdict(list)
    sizes: defaultdict[str, int] = defaultdict(int)
    for path in files:
        seen = 0
        for record in jsonlines.read(path):
            source = "code" if record["source"].startswith("code/") else record["source"]
            source = f"chat: {source}" if "messages" in record else source
            for text in texts_of(record):
                seen += len(text)
                if sizes[source] < megabytes * 1e6:
                    sizes[source] += len(text.encode())
                    read[source].append(text)
            if seen > 20e6:
                break
    encode = tokenizer.backend_tokenizer.encode_batch
    return {s: sizes[s] / sum(len(e) for e in encode(texts, add_special_tokens=False)) for s, texts in read.items()}


def main(
    data: Annotated[Path, typer.Option(help="Folder with pretrain/ and, optionally, chat/.")],
    out: Annotated[Path, typer.Option(help="Tokenizer directory to write.")],
    vocabulary: int = VOCABULARY,
) -> None:
    """Train the tokenizer and report bytes per token by source."""
    files = [p for p in sorted(data.glob("pretrain/*.jsonl.xz")) if not p.name.startswith("validation")]
    files += sorted(data.glob("chat/*.jsonl.xz"))
    if not files:
        jsonlines.fail(f"{data} holds no pretrain/*.jsonl.xz")
    console = Console()
    start = time.perf_counter()
    save(train(sample(files, SAMPLE_MB), vocabulary, progress=console.is_terminal), out)
    console.print(f"trained in {time.perf_counter() - start:.0f} s on {len(files)} files")
    tokenizer = AutoTokenizer.from_pretrained(out)
    table = Table("source", "bytes per token")
    rates = bytes_per_token(tokenizer, files)
    for source, rate in sorted(rates.items()):
        table.add_row(source, f"{rate:.2f}")
    console.print(table)
    console.print(json.dumps({s: round(r, 3) for s, r in rates.items()}))


if __name__ == "__main__":
    typer.run(main)
