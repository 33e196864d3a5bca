"""Named changes to a workload's prompts, which compose: `template:llama3+pad:4k:before`.

    template:FAMILY                     another family's chat template (see templates.py)
    template-noise:RATE                 that share of the template's tokens replaced, doubled or dropped
    system:none|short|long|out-of-domain|other-language
    pad:SIZE[:before|:after]            SIZE (1k to 128k) tokens of text that does not matter, around the question
    history:N                           N earlier exchanges about other things
    tools                               descriptions of functions that could be called
    json                                asks for a JSON object
    switch:code-prose|prose-code        asks for an answer that changes from one to the other
    temperature:T                       samples instead of taking the likeliest token

Each is a pure function of the conversation, a random generator and the run's limits. What is drawn follows from the
seed, the perturbation's name and the conversation's id alone, so that order and company do not matter. Whatever order
they are written in, padding comes after all other changes of messages (it must know what room is left), and noise last
(it is done on tokens).
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fledge.drift.perturb_messages import (
    NotApplicableError,
    PerturbationContext,
    ask_for_json,
    ask_for_switch,
    change_system,
    describe_tools,
    pad,
    put_history,
    token_noise,
)
from fledge.drift.segments import Conversation, segmented
from fledge.drift.templates import FAMILIES, chat_template
from fledge.errors import ConfigError, PromptError, nearest_name_hint

UNPERTURBED = "unperturbed"
PAD_SIZES = ("1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k")
MAX_EXCHANGES = 8  # as many as there are to choose from
SWITCHES = ("code-prose", "prose-code")
SYSTEMS = ("none", "short", "long", "out-of-domain", "other-language")
KINDS = ("template", "template-noise", "system", "pad", "history", "tools", "json", "switch", "temperature")
_SIDES = ("before", "after")
_STAGES = {"pad": 1, "template-noise": 2}  # of the kinds that must not come in the order they were written in

Change = Callable[[Conversation, random.Random, PerturbationContext], Conversation]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One named change: of the conversation, or of the temperature."""

    name: str
    kind: str
    change: Change | None = None
    temperature: float | None = None


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """Changes that are made together. Without any it is the unperturbed run."""

    steps: tuple[Step, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(step.name for step in self.steps) or UNPERTURBED

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(step.kind for step in self.steps)

    @property
    def temperature(self) -> float | None:
        """What the perturbation samples with; None leaves the run's own."""
        return next((step.temperature for step in self.steps if step.temperature is not None), None)

    def apply(self, conversation: Conversation, context: PerturbationContext) -> Conversation:
        """Return the changed conversation under the same id. Raises NotApplicableError, with a reason."""
        for step in sorted(self.steps, key=lambda step: _STAGES.get(step.kind, 0)):
            if step.change is not None:
                generator = random.Random(f"{context.seed}/{step.name}/{conversation.id}")
                conversation = step.change(conversation, generator, context)
        _check_fit(conversation, context)
        return conversation


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """A workload after a perturbation, and what was left out of it."""

    conversations: tuple[Conversation, ...]
    temperature: float | None = None
    left_out: dict[str, str]  # conversation id -> reason
    skip: str | None = None  # why there is nothing to run


def perturb(
    perturbation: Perturbation, conversations: Sequence[Conversation], context: PerturbationContext
) -> Perturbed:
    """Apply a perturbation to all conversations that it applies to and that fit afterwards."""
    changed: list[Conversation] = []
    left_out: dict[str, str] = {}
    differs = perturbation.temperature is not None or not perturbation.steps
    for conversation in conversations:
        try:
            after = perturbation.apply(conversation, context)
        except NotApplicableError as error:
            left_out[conversation.id] = str(error)
            continue
        differs = differs or not _reads_alike(conversation, after, context)
        changed.append(after)
    skip = None
    if not changed:
        (reason, count), *_ = Counter(left_out.values()).most_common(1) or [("the workload is empty", 0)]
        skip = reason if count == len(left_out) else f"{reason} (and {len(left_out) - count} prompts for other reasons)"
    elif not differs:
        skip = "changes no prompt of this workload"
    return Perturbed(
        conversations=() if skip else tuple(changed),
        temperature=perturbation.temperature,
        left_out=left_out,
        skip=skip,
    )


def parse_perturbation(name: str) -> Perturbation:
    """Return the perturbation of a name such as `template:llama3+pad:4k:after`."""
    if name.strip() == UNPERTURBED:
        return Perturbation()
    steps = tuple(_parse_step(part.strip()) for part in name.split("+"))
    counts = Counter(step.name if step.kind == "pad" else step.kind for step in steps)
    for kind, count in counts.items():
        if count > 1:
            raise ConfigError(f"perturbation '{name}': '{kind}' is given {count} times, allowed is once")
    return Perturbation(steps=steps)


def default_suite(size: str = "quick") -> tuple[str, ...]:
    """Names of what `fledge drift` runs besides the unperturbed workload: a "quick" or a "full" suite.

    The full one has every perturbation; what a model cannot hold is skipped with a reason.
    """
    if size not in ("quick", "full"):
        raise ConfigError(f"unknown suite '{size}'.{nearest_name_hint(size, ('quick', 'full'))}")
    if size == "quick":
        return _QUICK
    return (
        *(f"template:{family}" for family in FAMILIES),
        *(f"template-noise:{rate}" for rate in ("0.02", "0.05", "0.2")),
        *(f"system:{kind}" for kind in SYSTEMS),
        *(f"pad:{size}:before" for size in PAD_SIZES),
        *(f"pad:{size}:after" for size in PAD_SIZES),
        "history:2",
        "history:4",
        "tools",
        "json",
        *(f"switch:{kind}" for kind in SWITCHES),
        "temperature:0.7",
        "temperature:1.0",
        "template:llama3+pad:2k:before",
        "system:other-language+history:2",
        "template:alpaca+system:long+temperature:0.7",
    )


_QUICK = (
    "template:llama3",
    "template:mistral",
    "template:alpaca",
    "template:plain",
    "template-noise:0.05",
    "system:long",
    "system:out-of-domain",
    "pad:1k:before",
    "pad:2k:before",
    "history:2",
    "tools",
    "json",
    "switch:code-prose",
    "temperature:0.7",
)


def _known_names() -> list[str]:
    return sorted({*default_suite("full"), "pad:1k", *KINDS} - {name for name in default_suite("full") if "+" in name})


def _refuse(name: str, why: str) -> ConfigError:
    return ConfigError(f"perturbation '{name}': {why}")


def _parse_step(name: str) -> Step:
    kind, *arguments = name.split(":")
    if kind not in KINDS:
        raise ConfigError(f"unknown perturbation '{name}'.{nearest_name_hint(name, _known_names())}")
    if len(arguments) > (2 if kind == "pad" else 0 if kind in ("tools", "json") else 1):
        raise _refuse(name, f"too many parts; write {_USAGE[kind]}")
    if kind in ("tools", "json"):
        return Step(name=name, kind=kind, change=describe_tools if kind == "tools" else ask_for_json)
    if not arguments or not arguments[0]:
        raise _refuse(name, f"what kind of '{kind}'? Write {_USAGE[kind]}")
    return _PARSERS[kind](name, arguments)


def _parse_template(name: str, arguments: list[str]) -> Step:
    family = _one_of(name, arguments[0], FAMILIES)
    template = chat_template(family)

    def change(conversation: Conversation, _: random.Random, __: PerturbationContext) -> Conversation:
        if conversation.messages is None:
            raise NotApplicableError("the prompt has no messages to write in a template")
        return replace(conversation, chat_template=template)

    return Step(name=name, kind="template", change=change)


def _parse_noise(name: str, arguments: list[str]) -> Step:
    rate = _number(name, arguments[0], 0.0, 1.0)
    return Step(name=name, kind="template-noise", change=lambda c, g, context: token_noise(c, g, context, rate))


def _parse_system(name: str, arguments: list[str]) -> Step:
    which = _one_of(name, arguments[0], SYSTEMS)
    return Step(name=name, kind="system", change=lambda c, g, context: change_system(c, g, context, which))


def _parse_pad(name: str, arguments: list[str]) -> Step:
    found = re.fullmatch(r"([0-9]{1,3})k", arguments[0])
    if found is None or not 1 <= int(found[1]) <= 128:
        raise _refuse(name, f"found size '{arguments[0]}', allowed is 1k to 128k")
    side = _one_of(name, arguments[1], _SIDES) if len(arguments) == 2 else "before"
    tokens = 1024 * int(found[1])
    return Step(
        name=f"pad:{int(found[1])}k:{side}",
        kind="pad",
        change=lambda c, g, context: pad(c, g, context, tokens, before=side == "before"),
    )


def _parse_history(name: str, arguments: list[str]) -> Step:
    if not re.fullmatch(r"[1-9]", arguments[0]) or int(arguments[0]) > MAX_EXCHANGES:
        raise _refuse(name, f"found {arguments[0]!r}, allowed is 1 to {MAX_EXCHANGES} exchanges")
    count = int(arguments[0])
    return Step(name=name, kind="history", change=lambda c, g, context: put_history(c, g, context, count))


def _parse_switch(name: str, arguments: list[str]) -> Step:
    which = _one_of(name, arguments[0], SWITCHES)
    return Step(name=name, kind="switch", change=lambda c, g, context: ask_for_switch(c, g, context, which))


def _parse_temperature(name: str, arguments: list[str]) -> Step:
    return Step(name=name, kind="temperature", temperature=_number(name, arguments[0], 0.0, 2.0))


_PARSERS: dict[str, Callable[[str, list[str]], Step]] = {
    "template": _parse_template,
    "template-noise": _parse_noise,
    "system": _parse_system,
    "pad": _parse_pad,
    "history": _parse_history,
    "switch": _parse_switch,
    "temperature": _parse_temperature,
}
_USAGE = {
    "template": f"template:{'|'.join(FAMILIES)}",
    "template-noise": "template-noise:0.05",
    "system": f"system:{'|'.join(SYSTEMS)}",
    "pad": "pad:4k:before or pad:4k:after",
    "history": "history:2",
    "tools": "tools",
    "json": "json",
    "switch": f"switch:{'|'.join(SWITCHES)}",
    "temperature": "temperature:0.7",
}


def _one_of(name: str, value: str, known: Iterable[str]) -> str:
    kind = name.split(":", maxsplit=1)[0]
    if value not in known:
        raise ConfigError(f"unknown {kind} '{value}' in perturbation '{name}'.{nearest_name_hint(value, known)}")
    return value


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low < value <= high:
        raise _refuse(name, f"found '{text}', allowed is a number above {low:g}, up to {high:g}")
    return value


def _check_fit(conversation: Conversation, context: PerturbationContext) -> None:
    try:
        length = len(segmented(conversation, context.tokenizer).token_ids)
    except PromptError as error:
        raise NotApplicableError(str(error)) from None
    if length + context.answer_tokens > context.max_model_len:
        raise NotApplicableError(
            f"the prompt and an answer of {context.answer_tokens} tokens do not fit into {context.max_model_len} tokens"
        )


def _reads_alike(before: Conversation, after: Conversation, context: PerturbationContext) -> bool:
    """Whether the model reads the same tokens."""
    if before == after:
        return True
    first, second = _ids(before, context), _ids(after, context)
    return first is not None and first == second


def _ids(conversation: Conversation, context: PerturbationContext) -> Any:
    try:
        return segmented(conversation, context.tokenizer).token_ids
    except PromptError:  # a tokenizer without a template of its own: whatever is rendered differs
        return None
