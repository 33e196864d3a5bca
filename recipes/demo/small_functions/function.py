"""Puts parts together to a function, in words and in code, and runs it for examples."""

import math
import random
import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from recipes.demo.small_functions.parts import SOURCES, Argument, Change, Condition, Reduction, Source, parts


@dataclass(frozen=True)
class Function:
    """A function in words and in code, and calls of it with the results they had."""

    name: str
    purpose: str  # "return the sum of the squares of the even numbers in a list"
    signature: str  # as defined
    imports: str
    helper: str
    body: str
    calls: tuple[tuple[str, str], ...]

    def code(self, docstring: str) -> str:
        before = [part for part in (self.imports, self.helper) if part]
        lines = [self.signature, *([docstring] if docstring else []), textwrap.indent(self.body, "    ")]
        return "\n\n\n".join([*before, "\n".join(lines)])

    def given(self, docstring: str) -> str:
        before = [part for part in (self.imports, self.helper) if part]
        return "\n\n\n".join([*before, f"{self.signature}\n{docstring}"])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parts of a function, its arguments' names, and what {k} is: a number or an argument."""

    source: Source
    condition: Condition | None
    change: Change | None
    reduction: Reduction
    names: tuple[str, ...]
    k: str

    @property
    def kind(self) -> str:
        return self.change.result if self.change else self.source.kind

    def purpose(self, adjective: bool) -> str:
        """What it does, in words; `adjective` says "the even numbers" where it can."""
        noun, place = self.source.noun, self.source.place.format(*self.names)
        if self.condition is None:
            phrase = f"the {noun} {place}"
        elif self.condition.adjective and adjective:
            phrase = f"the {self.condition.adjective} {noun} {place}"
        else:
            k = f"`{self.k}`" if self.k in self.names else self.k
            phrase = f"the {noun} {place} that {self.condition.plural.format(k=k)}"
        return (
            f"return {self.reduction.phrase.format(np=self.change.phrase.format(np=phrase) if self.change else phrase)}"
        )

    def forms(self) -> list[str]:
        """The bodies it can have: an expression, the same with a list before it, a loop."""
        x, iterable, before = self.source.target, self.source.iterable.format(*self.names), ""
        if self.source.element:
            plural, x = self.source.stored
            before = f"{plural} = [{self.source.element} for {self.source.target} in {iterable}]\n"
            iterable = plural
        test = self.condition.code.format(x=x, k=self.k) if self.condition else ""
        value = self.change.code.format(x=x) if self.change else x
        found = []
        if self.reduction.code:
            each = f"{value} for {x} in {iterable}" + (f" if {test}" if test else "")
            if len(each) < 66:
                code = self.reduction.code.format(each=each, each_in=f"({each})", list=f"[{each}]")
                found.append(f"{before}return {code}")
            code = self.reduction.code.format(each="selected", each_in="selected", list="selected")
            found.append(f"{before}selected = [{each}]\nreturn {code}")
        if self.reduction.start:
            several = self.change is not None and self.reduction.step.count("{x}") > 1
            steps = [f"changed = {value}"] if several else []
            steps += self.reduction.step.format(x="changed" if several else value).splitlines()
            if test:
                steps = [f"if {test}:", *(f"    {s}" for s in steps)]
            loop = "\n".join([f"for {x} in {iterable}:", *(f"    {s}" for s in steps)])
            found.append(f"{before}{self.reduction.start.format()}\n{loop}\nreturn {self.reduction.end}")
        return found

    def run(self, arguments: list[Any]) -> list[Any]:
        """The results of all forms for one call; the code is ours, so it may be run."""
        results = []
        for body in self.forms():
            namespace: dict[str, Any] = {"math": math, "Counter": Counter}
            helper = self.condition.helper if self.condition else ""
            exec(f"{helper}\n\ndef made({', '.join(self.names)}):\n{textwrap.indent(body, '    ')}", namespace)
            results.append(namespace["made"](*arguments))
        return results


def plan(rng: random.Random) -> tuple[Plan, list[Argument]]:
    """Draw parts that fit each other."""
    source = rng.choice(SOURCES)
    condition, change = (
        rng.choice([p for p in parts(part) if source.kind in p.kinds.split()]) if rng.random() < share else None
        for part, share in (("condition", 0.85), ("change", 0.5))
    )
    kind = change.result if change else source.kind
    reduction = rng.choice([r for r in parts("reduction") if kind in r.kinds.split()])
    arguments, names = list(source.arguments), list[str]()
    for argument in arguments:
        names.append(
            rng.choice([n for n in argument.names.split() if n not in (*names, source.target, *source.stored)])
        )
    k = ""
    if condition and condition.threshold:
        parameter, low, high = condition.threshold
        k = str(rng.randint(low, high))
        if rng.random() < 0.5 and parameter not in (*names, source.target, *source.stored):
            k = parameter
            names.append(parameter)
            arguments.append(Argument(parameter, "int", lambda rng: rng.randint(low, high)))
    return Plan(
        source=source, condition=condition, change=change, reduction=reduction, names=tuple(names), k=k
    ), arguments


def function(rng: random.Random) -> Function | None:
    """Put one together; None where a part makes no difference or the results are all the same."""
    made, arguments = plan(rng)
    parts = [part for part in (made.change, made.condition) if part]
    if not parts:
        return None
    words = [made.reduction.name, *(part.name for part in parts), made.source.noun]
    draw = rng.random()
    if draw < 0.3:
        words = words[1:] if words[0] in ("list", "string") else words
    elif draw < 0.5:
        words = [rng.choice(("get", "find", "compute")), *words[:-1]]
    name = "_".join(dict.fromkeys("_".join(words).split("_")))
    calls = _calls(made, name, arguments, rng)
    if calls is None:
        return None
    body = rng.choice(made.forms())
    imports = [line for line in ("import math", "from collections import Counter") if line.split()[-1] in body]
    hints = [argument.hint for argument in arguments]
    result = made.reduction.hint.format(e="int" if made.kind == "int" else "str")
    style = rng.choice(("plain", "hints", "typing"))
    if style == "typing":
        hints, result = [_in_typing(h) for h in hints], _in_typing(result)
        used = [t for t in ("Dict", "List", "Optional") if t in " ".join([*hints, result])]
        imports += [f"from typing import {', '.join(used)}"] if used else []
    hinted = ", ".join(n if style == "plain" else f"{n}: {h}" for n, h in zip(made.names, hints, strict=True))
    return Function(
        name=name,
        purpose=made.purpose(adjective=rng.random() < 0.7),
        signature=f"def {name}({hinted}){'' if style == 'plain' else f' -> {result}'}:",
        imports="\n".join(imports),
        helper=made.condition.helper if made.condition else "",
        body=body,
        calls=calls,
    )


def _in_typing(hint: str) -> str:
    plain = hint.removesuffix(" | None")
    hint = hint if plain == hint else f"Optional[{plain}]"
    return hint.replace("list[", "List[").replace("dict[", "Dict[")


def _calls(made: Plan, name: str, arguments: list[Argument], rng: random.Random) -> tuple[tuple[str, str], ...] | None:
    """Up to four short calls with their results, on which all forms agree and each part makes a difference."""
    simpler = [replace(made, condition=None)] * bool(made.condition) + [replace(made, change=None)] * bool(made.change)
    simpler = [s for s in simpler if s.kind in s.reduction.kinds.split()]
    matters = [False] * len(simpler)
    calls: dict[str, str] = {}
    for _ in range(8):
        values = [argument.draw(rng) for argument in arguments]
        results = made.run(values)
        if any(result != results[0] for result in results):
            raise AssertionError(f"the forms of {name} disagree: {made}")
        matters = [m or s.run(values)[0] != results[0] for m, s in zip(matters, simpler, strict=True)]
        written, result = ", ".join(map(repr, values)), repr(results[0])
        if len(written) + len(result) <= 90 and len(calls) < 4:
            calls[f"{name}({written})"] = result
    return tuple(calls.items()) if all(matters) and len(set(calls.values())) > 1 else None
