"""Named changes to a workload's prompts, which compose: `template:llama3+pad:4k:before`.

    template:FAMILY                     another family's chat template (see `FAMILIES`)
    template-noise:RATE                 that share of the template's tokens replaced, doubled or dropped
    system:none|short|long|out-of-domain|other-language
    pad:SIZE[:before|:after]            SIZE (1k to 128k) tokens of text that does not matter, around the question
    history:N                           N earlier exchanges about other things
    tools                               descriptions of functions that could be called
    json                                asks for a JSON object
    switch:code-prose|prose-code        asks for an answer that changes from one to the other
    temperature:T                       samples instead of taking the likeliest token

Each (changes.py) is a pure function of the prompt, a random generator and the run's limits. What is drawn follows from
the seed, the perturbation's name and the prompt's id alone, so that order and company do not matter. Whatever order
they are written in, padding comes after all other changes of messages (it must know what room is left), and noise last
(it is done on tokens).
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.drift.changes import (
    FAMILIES,
    NotApplicableError,
    PerturbationContext,
    ask_for_json,
    ask_for_switch,
    change_system,
    change_template,
    describe_tools,
    pad,
    put_history,
    texts,
    token_noise,
)
from fledge.drift.segments import ProbePrompt, segmented
from fledge.errors import ConfigError, PromptError, nearest_name_hint

UNPERTURBED = "unperturbed"
MAX_EXCHANGES = 8  # as many as there are to choose from
SWITCHES = ("code-prose", "prose-code")
SYSTEMS = ("none", "short", "long", "out-of-domain", "other-language")


@dataclass(frozen=True, kw_only=True)
class PerturbationKind:
    """How a kind of change is written, how what follows its name is read, and what it does to a prompt."""

    usage: str
    read: Callable[[str, list[str]], Any] | None = None  # (the whole name, its parts after the first); None: no parts
    change: Callable[[ProbePrompt, random.Random, PerturbationContext, Any], ProbePrompt] | None = None
    stage: int = 0  # of the kinds that must not come in the order they were written in
    changes_task: bool = False  # asks for another answer, so that part of a loss is the task's


@dataclass(frozen=True, kw_only=True)
class PerturbationStep:
    """One named change, with its argument."""

    name: str
    kind: str
    argument: Any


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """Changes that are made together. Without any it is the unperturbed run."""

    steps: tuple[PerturbationStep, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(step.name for step in self.steps) or UNPERTURBED

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(step.kind for step in self.steps)

    @property
    def temperature(self) -> float | None:
        """What the perturbation samples with; None leaves the run's own."""
        return next((step.argument for step in self.steps if step.kind == "temperature"), None)

    def apply(self, prompt: ProbePrompt, context: PerturbationContext) -> ProbePrompt:
        """Return the changed prompt under the same id. Raises NotApplicableError, with a reason."""
        for step in sorted(self.steps, key=lambda step: KINDS[step.kind].stage):
            change = KINDS[step.kind].change
            if change is not None:
                generator = random.Random(f"{context.seed}/{step.name}/{prompt.id}")
                prompt = change(prompt, generator, context, step.argument)
        _check_fit(prompt, context)
        return prompt


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """Prompts after a perturbation, and what was left out of them."""

    prompts: tuple[ProbePrompt, ...]
    left_out: dict[str, str]  # prompt id -> reason
    skip: str | None = None  # why there is nothing to run


def perturb(perturbation: Perturbation, prompts: Sequence[ProbePrompt], context: PerturbationContext) -> Perturbed:
    """Apply a perturbation to all prompts that it applies to and that fit afterwards."""
    changed: list[ProbePrompt] = []
    left_out: dict[str, str] = {}
    differs = perturbation.temperature is not None or not perturbation.steps
    for prompt in prompts:
        try:
            after = perturbation.apply(prompt, context)
        except NotApplicableError as error:
            left_out[prompt.id] = str(error)
            continue
        differs = differs or not _reads_alike(prompt, after, context)
        changed.append(after)
    skip = None
    if not changed:
        (reason, count), *_ = Counter(left_out.values()).most_common(1) or [("the workload is empty", 0)]
        skip = reason if count == len(left_out) else f"{reason} (and {len(left_out) - count} prompts for other reasons)"
    elif not differs:
        skip = "changes no prompt of this workload"
    return Perturbed(prompts=() if skip else tuple(changed), left_out=left_out, skip=skip)


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
    """Names of what `fledge drift` runs besides the unperturbed workload: a "quick" suite, or all kinds: "full"."""
    suites = texts("suites")
    if size not in suites:
        raise ConfigError(f"unknown suite '{size}'.{nearest_name_hint(size, suites)}")
    return tuple(suites[size])


def _parse_step(name: str) -> PerturbationStep:
    kind, *parts = name.split(":")
    if kind not in KINDS:
        single = [known for known in default_suite("full") if "+" not in known]
        raise ConfigError(f"unknown perturbation '{name}'.{nearest_name_hint(name, {*single, 'pad:1k', *KINDS})}")
    read, usage = KINDS[kind].read, KINDS[kind].usage
    if len(parts) > (0 if read is None else 2 if kind == "pad" else 1):
        raise _refusal(name, f"too many parts; write {usage}")
    if read is None:
        return PerturbationStep(name=name, kind=kind, argument=None)
    if not parts or not parts[0]:
        raise _refusal(name, f"what kind of '{kind}'? Write {usage}")
    argument = read(name, parts)
    return PerturbationStep(name=f"pad:{argument}" if kind == "pad" else name, kind=kind, argument=argument)


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(f"perturbation '{name}': {why}")


def _one_of(*known: str) -> Callable[[str, list[str]], str]:
    def read(name: str, parts: list[str]) -> str:
        if parts[-1] not in known:
            kind = name.partition(":")[0]
            hint = nearest_name_hint(parts[-1], known)
            raise ConfigError(f"unknown {kind} '{parts[-1]}' in perturbation '{name}'.{hint}")
        return parts[-1]

    return read


def _number(*, up_to: float) -> Callable[[str, list[str]], float]:
    def read(name: str, parts: list[str]) -> float:
        try:
            value = float(parts[0])
        except ValueError:
            value = float("nan")
        if not 0 < value <= up_to:
            raise _refusal(name, f"found '{parts[0]}', allowed is a number above 0, up to {up_to:g}")
        return value

    return read


def _read_exchanges(name: str, parts: list[str]) -> int:
    if not re.fullmatch(r"[1-9]", parts[0]) or int(parts[0]) > MAX_EXCHANGES:
        raise _refusal(name, f"found {parts[0]!r}, allowed is 1 to {MAX_EXCHANGES} exchanges")
    return int(parts[0])


def _read_padding(name: str, parts: list[str]) -> str:
    found = re.fullmatch(r"([0-9]{1,3})k", parts[0])
    if found is None or not 1 <= int(found[1]) <= 128:
        raise _refusal(name, f"found size '{parts[0]}', allowed is 1k to 128k")
    side = _one_of("before", "after")(name, parts) if len(parts) == 2 else "before"
    return f"{int(found[1])}k:{side}"


KINDS = {
    "template": PerturbationKind(
        usage=f"template:{'|'.join(FAMILIES)}", read=_one_of(*FAMILIES), change=change_template
    ),
    "template-noise": PerturbationKind(usage="template-noise:0.05", read=_number(up_to=1), change=token_noise, stage=2),
    "system": PerturbationKind(usage=f"system:{'|'.join(SYSTEMS)}", read=_one_of(*SYSTEMS), change=change_system),
    "pad": PerturbationKind(usage="pad:4k:before or pad:4k:after", read=_read_padding, change=pad, stage=1),
    "history": PerturbationKind(usage="history:2", read=_read_exchanges, change=put_history),
    "tools": PerturbationKind(usage="tools", change=describe_tools),
    "json": PerturbationKind(usage="json", change=ask_for_json, changes_task=True),
    "switch": PerturbationKind(
        usage=f"switch:{'|'.join(SWITCHES)}", read=_one_of(*SWITCHES), change=ask_for_switch, changes_task=True
    ),
    "temperature": PerturbationKind(usage="temperature:0.7", read=_number(up_to=2), changes_task=True),
}


def _check_fit(prompt: ProbePrompt, context: PerturbationContext) -> None:
    try:
        length = len(segmented(prompt, context.tokenizer).token_ids)
    except PromptError as error:
        raise NotApplicableError(str(error)) from None
    if length + context.answer_tokens > context.max_model_len:
        raise NotApplicableError(
            f"the prompt and an answer of {context.answer_tokens} tokens do not fit into {context.max_model_len} tokens"
        )


def _reads_alike(before: ProbePrompt, after: ProbePrompt, context: PerturbationContext) -> bool:
    """Whether the model reads the same tokens."""
    if before == after:
        return True
    first, second = _ids(before, context), _ids(after, context)
    return first is not None and first == second


def _ids(prompt: ProbePrompt, context: PerturbationContext) -> Any:
    try:
        return segmented(prompt, context.tokenizer).token_ids
    except PromptError:  # a tokenizer without a template of its own: whatever is rendered differs
        return None
