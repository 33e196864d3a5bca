"""Named changes to a workload's prompts (data/perturbations.yaml), which compose: `template:llama3+pad:4k:before`.

Most perturbations change the prompt: they are pure functions of it, a random generator, the run's limits and their own
argument. The others (`temperature`, `noise`, `pin`) leave the prompt as it is and change how it is decoded or drafted.
The texts that are put into prompts are data (data/*.yaml, chat_templates/*.jinja).

The generator is seeded with the seed, the perturbation's name and the prompt's id, so the result does not depend on
other prompts or on their order. In whatever order changes are written, padding is applied after all other changes of
messages, because it must know how much room is left, and changes of token ids are applied last.
"""

import json
import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from fledge.drift.prompts import ProbePrompt, Segment, segmented
from fledge.errors import ConfigError, PromptError, nearest_name_hint

UNPERTURBED = "unperturbed"
SYSTEM_ROLES = ("system", "developer")
# Tokens that padding leaves free: the whole text may have a few more than its parts.
_SLACK = 32


@dataclass(frozen=True, kw_only=True)
class PerturbationContext:
    """What perturbations need to know about the run."""

    tokenizer: Any | None  # of the target
    max_model_len: int  # tokens of prompt and answer together, of target and drafter
    answer_tokens: int
    seed: int = 0
    vocab_size: int | None = None  # only smaller ids are put into prompts; None: the size of the tokenizer


def chat_template(family: str) -> str:
    """Return a family's template as Jinja text, for `ProbePrompt.chat_template`."""
    return (files("fledge.drift") / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8").rstrip("\n")


@cache
def texts(name: str) -> dict[str, Any]:
    """What data/NAME.yaml holds: `insertions` (system prompts, exchanges, tools, requests), `suites`, `figures`, ..."""
    return dict(yaml.safe_load((files("fledge.drift") / "data" / f"{name}.yaml").read_text(encoding="utf-8")))


KINDS: dict[str, dict[str, Any]] = texts("perturbations")
# Chat templates of other model families, rendered with the target's own tokenizer. Markers of another family ([INST],
# <|eot_id|>) are special tokens only if the tokenizer knows them, and ordinary text otherwise, just as when a target is
# served with the wrong template. The begin-of-text token is the tokenizer's own, if it has one.
FAMILIES: list[str] = KINDS["template"]["names"]


def _changed(
    prompt: ProbePrompt, kind: str, argument: str, generator: random.Random, context: PerturbationContext
) -> ProbePrompt:
    """Make one change of messages."""
    if not prompt.messages:
        raise PromptError("the prompt is plain text or token ids, without messages to change")
    known, messages = texts("insertions"), list(prompt.messages)
    if kind == "template":
        return replace(prompt, chat_template=chat_template(argument))
    if kind == "pad":
        return _padded(prompt, argument, generator, context)
    if kind in ("json", "switch"):
        return _asked(prompt, "{text}\n\n" + (known["switches"][argument] if argument else known["json_request"]))
    if kind == "system":  # replaces any system prompt
        messages = [message for message in messages if message["role"] not in SYSTEM_ROLES]
        if argument != "none":
            messages.insert(0, {"role": "system", "content": generator.choice(known["system"][argument])})
    elif kind == "history":  # between the system prompt and the first question
        first = next((i for i, one in enumerate(messages) if one["role"] not in SYSTEM_ROLES), len(messages))
        exchanges = generator.sample(known["history"], int(argument))
        earlier = [{"role": role, "content": one[role]} for one in exchanges for role in ("user", "assistant")]
        messages[first:first] = earlier
    elif kind == "tools":  # appended to the system prompt, which also works with templates that know no tools
        described = "\n".join([known["tools_preamble"], "", *(json.dumps(tool) for tool in known["tools"])])
        if messages[0]["role"] in SYSTEM_ROLES:
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}
        else:
            messages.insert(0, {"role": "system", "content": described})
    return replace(prompt, messages=tuple(messages))


def _padded(prompt: ProbePrompt, size: str, generator: random.Random, context: PerturbationContext) -> ProbePrompt:
    """Put unrelated text around the last question: about as many tokens as `size` says, such as "4k:before".

    If question, padding and answer do not fit together, the padding is shortened, but not below half its size.
    """
    thousands, side = size.split("k:")
    tokens, limit, answer = 1024 * int(thousands), context.max_model_len, context.answer_tokens
    wording = texts("insertions")["padding"][side]
    room = limit - answer - len(segmented(_asked(prompt, wording, padding=""), context.tokenizer).token_ids) - _SLACK
    if tokens > limit:
        raise PromptError(f"{tokens} tokens of padding do not fit into {limit} tokens")
    if room < tokens / 2:
        several = f"{tokens} tokens of padding, the prompt and an answer of {answer} tokens"
        raise PromptError(f"{several} do not fit into {limit} tokens")
    return _asked(prompt, wording, padding=_distraction(generator, context.tokenizer, min(tokens, room)))


def _noisy(prompt: ProbePrompt, rate: float, generator: random.Random, context: PerturbationContext) -> ProbePrompt:
    """Replace, double or drop each of the template's tokens with probability `rate`; messages stay as they are.

    A begin-of-text token at the start is kept: it is the attention sink and not part of the template.
    """
    read = segmented(prompt, context.tokenizer)
    if context.tokenizer is None or Segment.TEMPLATE not in read.segments:
        raise PromptError("the prompt has no template tokens")
    special, size = set(context.tokenizer.all_special_ids), len(context.tokenizer)
    ordinary = [token for token in range(min(size, context.vocab_size or size)) if token not in special]
    ids: list[int] = []
    segments: list[Segment] = []
    for position, (token, segment) in enumerate(zip(read.token_ids, read.segments, strict=True)):
        kept = [token]
        is_begin = position == 0 and token == context.tokenizer.bos_token_id
        if segment is Segment.TEMPLATE and not is_begin and generator.random() < rate:
            kept = generator.choice(([generator.choice(ordinary)], [token, token], []))
        ids += kept
        segments += [segment] * len(kept)
    return _of_tokens(prompt, ids, segments)


def _without_begin(prompt: ProbePrompt, context: PerturbationContext) -> ProbePrompt:
    """Remove the begin-of-text token, which is the attention sink."""
    read = segmented(prompt, context.tokenizer)
    if context.tokenizer is None or read.token_ids[0] != context.tokenizer.bos_token_id:
        raise PromptError("the prompt has no begin-of-text token")
    return _of_tokens(prompt, read.token_ids[1:], read.segments[1:])


def _of_tokens(prompt: ProbePrompt, ids: Sequence[int], segments: Sequence[Segment]) -> ProbePrompt:
    return replace(prompt, messages=(), chat_template=None, text=None, token_ids=tuple(ids), segments=tuple(segments))


def distracting_paragraphs(generator: random.Random) -> Iterator[str]:
    """Yield endless paragraphs that have nothing to do with any question, drawn with the generator.

    Names, numbers and things are drawn anew for each paragraph, so that a long text does not repeat itself: repeated
    text would be far easier to predict than the long documents that it stands for.
    """
    words, patterns = texts("distractor")["words"], texts("distractor")["patterns"]
    while True:
        for pattern in generator.sample(patterns, len(patterns)):
            pairs = {name: generator.sample(choices, 2) for name, choices in words.items()}
            values = {f"{name}{end}": pair[i] for name, pair in pairs.items() for i, end in enumerate(("", "2"))}
            for name, low, high in (("year", 1702, 1889), ("number", 13, 960), ("small", 3, 12)):
                values[name] = generator.randint(low, high)
            yield string.Template(pattern).substitute(values)


def _distraction(generator: random.Random, tokenizer: Any, tokens: int) -> str:
    """Return about `tokens` tokens of text, never more."""
    parts: list[str] = []
    source = distracting_paragraphs(generator)
    while tokens > 0:
        words = next(source).split(" ")
        size = len(tokenizer("\n\n" + " ".join(words), add_special_tokens=False, verbose=False)["input_ids"])
        parts.append(" ".join(words[: int(len(words) * tokens / size)]))  # all of them where they fit
        tokens -= size
    return "\n\n".join(filter(None, parts))


def _asked(prompt: ProbePrompt, wording: str, **parts: str) -> ProbePrompt:
    """Reword the last user turn; `{text}` in `wording` stands for its text."""
    messages = list(prompt.messages)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise PromptError("the conversation has no user turn")
    messages[last] = {**messages[last], "content": wording.format(text=messages[last]["content"], **parts)}
    return replace(prompt, messages=tuple(messages))


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """Changes that are applied together, each by its full name. Without any, it is the unperturbed run."""

    steps: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(self.steps) or UNPERTURBED

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(step.partition(":")[0] for step in self.steps)

    @property
    def temperature(self) -> float | None:
        """The sampling temperature; None: the run's own."""
        given = (step.partition("temperature:")[2] for step in self.steps)
        return next((float(text) for text in given if text), None)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on the state that is fed to the next draft, relative to the state's RMS."""
        return next((float(step.partition(":")[2]) for step in self.steps if step.startswith("noise:")), 0.0)

    @property
    def pins(self) -> bool:
        """Whether the state that is fed to the next draft is scaled to its RMS at depth 1."""
        return "pin" in self.steps

    @property
    def answered_as(self) -> "Perturbation":
        """The perturbation with the same prompts and answers: the unperturbed run, if only drafting is changed."""
        return Perturbation() if set(self.kinds) <= {"noise", "pin"} else self

    def apply(self, prompt: ProbePrompt, context: PerturbationContext) -> ProbePrompt:
        """Return the changed prompt under the same id. Raises PromptError, with a reason."""
        parts = [(step, *step.partition(":")[::2]) for step in self.steps]
        for step, kind, argument in sorted(parts, key=lambda part: KINDS[part[1]].get("stage", 0)):
            generator = random.Random(f"{context.seed}/{step}/{prompt.id}")
            if kind == "template-noise":
                prompt = _noisy(prompt, float(argument), generator, context)
            elif kind == "bos":
                prompt = _without_begin(prompt, context)
            elif not KINDS[kind].get("leaves_prompt"):
                prompt = _changed(prompt, kind, argument, generator, context)
        length = len(segmented(prompt, context.tokenizer).token_ids)
        if length + context.answer_tokens > context.max_model_len:
            several = f"the prompt and an answer of {context.answer_tokens} tokens"
            raise PromptError(f"{several} do not fit into {context.max_model_len} tokens")
        return prompt


class Perturbed(NamedTuple):
    """Prompts after a perturbation, and what was left out of them."""

    prompts: tuple[ProbePrompt, ...]
    left_out: dict[str, str]  # prompt id -> reason
    skip: str | None = None  # why there is nothing to run


def perturb(perturbation: Perturbation, prompts: Sequence[ProbePrompt], context: PerturbationContext) -> Perturbed:
    """Apply a perturbation to all prompts that it applies to and that fit afterwards."""
    changed: list[ProbePrompt] = []
    left_out: dict[str, str] = {}
    differs = not perturbation.steps or any(KINDS[kind].get("leaves_prompt") for kind in perturbation.kinds)
    for prompt in prompts:
        try:
            after = perturbation.apply(prompt, context)
        except PromptError as error:
            left_out[prompt.id] = str(error)
            continue
        if not differs:
            before: tuple[int, ...] | None = None
            with suppress(PromptError):  # a tokenizer without a template of its own: whatever is rendered differs
                before = segmented(prompt, context.tokenizer).token_ids
            differs = before != segmented(after, context.tokenizer).token_ids
        changed.append(after)
    skip = None
    if not changed:
        skip = "; ".join(dict.fromkeys(left_out.values())) or "the workload is empty"
    elif not differs:
        skip = "changes no prompt of this workload"
    return Perturbed(prompts=() if skip else tuple(changed), left_out=left_out, skip=skip)


def parse_perturbation(name: str) -> Perturbation:
    """Return the perturbation of a name such as `template:llama3+pad:4k:after`."""
    steps: list[str] = []
    for step in name.split("+") if name.strip() != UNPERTURBED else ():
        kind, _, text = step.strip().partition(":")
        if kind not in KINDS:
            single = [known for known in default_suite("full") if "+" not in known]
            hint = nearest_name_hint(step.strip(), {*single, "pad:1k", *KINDS})
            raise ConfigError(f"unknown perturbation '{step.strip()}'.{hint}")
        about, names = KINDS[kind], KINDS[kind].get("names", ())
        if not re.fullmatch(about.get("pattern", "|".join(names)), text):
            hint = nearest_name_hint(text.rpartition(":")[2], names) if names else ""
            raise ConfigError(f"perturbation '{step.strip()}': {about['rule']}{hint}")
        if kind == "pad" and ":" not in text:
            text += ":before"
        steps.append(f"{kind}:{text}" if text else kind)
    counts = Counter(step if step.startswith("pad:") else step.partition(":")[0] for step in steps)
    for repeated, count in counts.items():
        if count > 1:
            raise ConfigError(f"perturbation '{name}': '{repeated}' is given {count} times, allowed is once")
    return Perturbation(steps=tuple(steps))


def default_suite(size: str) -> tuple[str, ...]:
    """Names of what `fledge drift` runs besides the unperturbed workload: a "quick" suite, or all kinds: "full"."""
    suites = texts("suites")
    if size not in suites:
        raise ConfigError(f"unknown suite '{size}'.{nearest_name_hint(size, suites)}")
    return tuple(suites[size])
