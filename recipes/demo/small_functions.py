"""Small Python functions put together from parts, with examples that were found by running them.

A function takes elements from somewhere (a list, the digits of a number, the words of a sentence), keeps those that
satisfy a condition, changes each, and reduces them to a result: "the sum of the squares of the even numbers in a list".
Parts are tables here; names, wording, hints and the way the body is written vary.
"""

import json
import math
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from recipes.demo import jsonlines
from recipes.demo.code_files import reserved_sequences, shares_words
from recipes.demo.completions import INTRODUCTIONS, WORDINGS

OVERLAP = 8  # words in a row that no docstring shares with an evaluation prompt
NAMES = ("anna", "ben", "carla", "david", "emma", "felix", "greta", "hugo", "ida", "jonas", "kim", "lena")
WORDS = tuple(
    word
    for line in (
        "apple level Paris river noon Cloud tree banana kayak Python sky moon Table radar window queen otter ice eagle",
        "rhythm code book civic orange umbrella key Stone wolf garden lamp x42 seven7 b2b HELLO Ok area refer fly",
    )
    for word in line.split()
)
SENTENCES = """\
the cat sat on the mat|a Quick brown fox|we saw an eagle over the river|Anna and Otto play at noon|it is what it is
one two three two one|Hello world|every good boy does fine|no lemon no melon|My dog ate 3 apples|time and tide wait
""".replace("\n", "|").strip("|").split("|")  # fmt: skip
TEXTS = ["Hello World", "banana", "a1b2c3", "Room 101", "level", "PyThOn", "mississippi", "x = 3 + 4", "abcABC", "2024"]

Draw = Callable[[random.Random], Any]


def integers(low: int, high: int) -> Draw:
    return lambda rng: [rng.randint(low, high) for _ in range(rng.randint(3, 7))]


def some(values: Sequence[str], least: int = 3, most: int = 5) -> Draw:
    return lambda rng: rng.sample(values, rng.randint(least, most))


@dataclass(frozen=True)
class Argument:
    names: str  # to choose from
    hint: str
    draw: Draw


@dataclass(frozen=True)
class Source:
    """Where elements come from: `element` for `target` in `iterable`, which may name arguments as {0} and {1}."""

    kind: str  # of an element: int, str or char
    noun: str
    place: str
    arguments: tuple[Argument, ...]
    target: str
    iterable: str = "{0}"
    element: str = ""  # the target itself where nothing is said, else they are stored first,
    stored: tuple[str, ...] = ()  # under a plural, of which one is a singular


@dataclass(frozen=True, kw_only=True)
class Condition:
    kinds: str  # of elements it can be asked of
    name: str
    singular: str  # "is even"
    plural: str  # "are even"
    code: str  # about {x}
    adjective: str = ""  # of the noun, where there is one
    threshold: tuple[str, int, int] | None = None  # {k}: an argument's name, least and greatest value
    helper: str = ""  # a function that `code` calls


@dataclass(frozen=True, kw_only=True)
class Change:
    kinds: str
    result: str  # the kind it makes
    name: str
    phrase: str  # of {np}
    code: str


@dataclass(frozen=True, kw_only=True)
class Reduction:
    kinds: str
    name: str
    phrase: str  # of {np}, which begins with "the"
    hint: str  # of the result; {e} is the elements'
    code: str = ""  # of {each}, the elements that remain ({each_in} in brackets, {list} of them); none for a loop only
    start: str = ""  # of a loop; none where there is no loop to write
    step: str = ""
    end: str = "result"


NUMBERS = Argument("numbers values nums data items", "list[int]", integers(-9, 20))
OTHER_NUMBERS = Argument("others second right", "list[int]", integers(-9, 20))
WORD_LIST = Argument("words strings names items", "list[str]", some(WORDS))
SENTENCE = Argument("sentence text line phrase", "str", lambda rng: rng.choice(SENTENCES))
TEXT = Argument("text string s word", "str", lambda rng: rng.choice([*TEXTS, *WORDS]))
SCORES = Argument(
    "scores ages prices stock",
    "dict[str, int]",
    lambda rng: {name: rng.randint(1, 60) for name in rng.sample(NAMES, rng.randint(2, 4))},
)
MATRIX = Argument(
    "matrix grid rows table",
    "list[list[int]]",
    lambda rng: [integers(-5, 12)(rng)[:3] for _ in range(rng.randint(2, 3))],
)
SOURCES = (
    Source("int", "numbers", "in a list", (NUMBERS,), "number"),
    Source("int", "integers", "in `{0}`", (NUMBERS,), "value"),
    Source("int", "elements", "of a list of integers", (NUMBERS,), "x"),
    Source(
        "int",
        "digits",
        "of a number",
        (Argument("number n value", "int", lambda rng: rng.randint(10, 98765)),),
        "digit",
        "str({0})",
        "int(digit)",
        ("digits", "digit"),
    ),
    Source(
        "int",
        "numbers",
        "from 1 to `{0}`",
        (Argument("n limit last", "int", lambda rng: rng.randint(3, 12)),),
        "i",
        "range(1, {0} + 1)",
    ),
    Source("int", "values", "of a dictionary", (SCORES,), "value", "{0}.values()"),
    Source(
        "int", "numbers", "in a matrix, given as a list of rows,", (MATRIX,), "x", "[x for row in {0} for x in row]"
    ),
    Source(
        "int",
        "differences",
        "between neighbours in a list",
        (NUMBERS,),
        "a, b",
        "zip({0}, {0}[1:])",
        "b - a",
        ("gaps", "gap"),
    ),
    Source(
        "int", "sums", "of neighbours in a list", (NUMBERS,), "a, b", "zip({0}, {0}[1:])", "a + b", ("pairs", "pair")
    ),
    Source(
        "int",
        "products",
        "of the pairs of two lists",
        (NUMBERS, OTHER_NUMBERS),
        "a, b",
        "zip({0}, {1})",
        "a * b",
        ("products", "item"),
    ),
    Source(
        "int",
        "lengths",
        "of the words in a sentence",
        (SENTENCE,),
        "word",
        "{0}.split()",
        "len(word)",
        ("lengths", "length"),
    ),
    Source(
        "int", "lengths", "of the strings in `{0}`", (WORD_LIST,), "item", "{0}", "len(item)", ("lengths", "length")
    ),
    Source("str", "words", "in a list", (WORD_LIST,), "word"),
    Source("str", "strings", "in `{0}`", (WORD_LIST,), "item"),
    Source("str", "words", "of a sentence", (SENTENCE,), "word", "{0}.split()"),
    Source("str", "keys", "of a dictionary", (SCORES,), "key", "{0}"),
    Source("char", "characters", "of a string", (TEXT,), "char"),
    Source("char", "characters", "in `{0}`", (TEXT,), "c"),
)


@cache
def _parts(kind: str) -> tuple[Any, ...]:
    """The conditions, changes or reductions of `small_functions.jsonl`."""
    of = {"condition": Condition, "change": Change, "reduction": Reduction}[kind]
    rows = jsonlines.read(Path(__file__).with_suffix(".jsonl"))
    return tuple(of(**{k: v for k, v in row.items() if k != "part"}) for row in rows if row["part"] == kind)


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
        rng.choice([p for p in _parts(part) if source.kind in p.kinds.split()]) if rng.random() < share else None
        for part, share in (("condition", 0.85), ("change", 0.5))
    )
    kind = change.result if change else source.kind
    reduction = rng.choice([r for r in _parts("reduction") if kind in r.kinds.split()])
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


BEGINNINGS = (
    "Return {}.",
    "Return {}.",
    "Find {}.",
    "Get {}.",
    "This function returns {}.",
    "Returns {}.",
    "Give back {}.",
)
EXAMPLE_HEADINGS = ("Examples:", "For example:", "Example:", "Some examples:")
REQUESTS = (
    "Write a Python function `{name}({arguments})` that returns {what}.",
    "Write a Python function that returns {what}. Call it `{name}`.",
    "I need a Python function `{name}` that returns {what}.",
    "Can you write a function `{name}({arguments})` in Python that returns {what}?",
    "Implement `{name}({arguments})`: it returns {what}.",
    "How do I get {what} in Python? Please write a function `{name}`.",
    "Please define a Python function `{name}` with the parameters `{arguments}`. It should return {what}.",
)
ANSWERS = (
    "Here is a function that returns {what}:",
    "`{name}` returns {what}:",
    "You can write it like this:",
    "Here is `{name}`:",
    "This function does it:",
)


def docstring(made: Function, rng: random.Random) -> str:
    """What the function does, with some of its calls as examples."""
    what = made.purpose.removeprefix("return ")
    sentence = textwrap.fill(rng.choice(BEGINNINGS).format(what), rng.choice((72, 88, 100)))
    calls = made.calls[: rng.randint(1, 3)]
    style = rng.random()
    if style < 0.65:
        lines = [line for call, result in calls for line in (f">>> {call}", result)]
    elif style < 0.8:
        lines = [rng.choice(EXAMPLE_HEADINGS), *(f"{call} == {result}" for call, result in calls)]
    elif style < 0.9:
        lines = [rng.choice(EXAMPLE_HEADINGS), *(f"{call} -> {result}" for call, result in calls)]
    else:
        lines = [f"{call} returns {result}" for call, result in calls]
    lines = [*sentence.splitlines(), *([""] if rng.random() < 0.5 else []), *lines]
    opened = '"""' if rng.random() < 0.7 else '""" '
    return textwrap.indent("\n".join([f"{opened}{lines[0]}", *lines[1:], '"""']), "    ")


def conversation(made: Function, rng: random.Random) -> jsonlines.Record:
    """A request to complete the function, or to write it, and the answer."""
    documented = docstring(made, rng)
    names = [n.split(":")[0] for n in re.findall(r"\((.*)\)", made.signature.split(" ->")[0])[0].split(", ") if n]
    fields = {"name": made.name, "arguments": ", ".join(names), "what": made.purpose.removeprefix("return ")}
    if rng.random() < 0.6:
        request = f"{rng.choice(WORDINGS).format(**fields)}\n\n```python\n{made.given(documented)}\n```"
        introduction, code = rng.choice(INTRODUCTIONS).format(**fields), made.code(documented)
    else:
        request = rng.choice(REQUESTS).format(**fields)
        if rng.random() < 0.6:
            request += " For example, `{}` returns `{}`.".format(*made.calls[0])
        introduction = rng.choice(ANSWERS).format(**fields)
        code = made.code(documented if rng.random() < 0.4 else "")
    answer = "\n\n".join([*([introduction] if introduction else []), f"```python\n{code}\n```"])
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "source": "small-functions"}


def conversations(count: int, reserved: set[tuple[str, ...]], seed: int) -> list[jsonlines.Record]:
    """Conversations about `count` functions, no two of which do the same; none shares words with what is reserved."""
    rng = random.Random(f"small-functions/{seed}")
    found: dict[str, jsonlines.Record] = {}
    for _ in range(count * 20):
        made = function(rng)
        if made is None or made.purpose in found:
            continue
        record = conversation(made, rng)
        if not any(shares_words(m["content"], reserved, OVERLAP) for m in record["messages"]):
            found[made.purpose] = record
        if len(found) == count:
            break
    return list(found.values())


def main(
    out: Annotated[Path, typer.Option(help="Conversations, .jsonl.xz.")],
    evaluation: Annotated[Path | None, typer.Option(help="Folder of evaluation files to keep out.")] = None,
    count: Annotated[int, typer.Option(help="Functions to make.")] = 12_000,
    seed: int = 1,
) -> None:
    """Make conversations about small functions that were put together from parts and run."""
    if evaluation and not evaluation.is_dir():
        jsonlines.fail(f"{evaluation} is not a folder")
    written = jsonlines.write(out, conversations(count, reserved_sequences(evaluation, OVERLAP), seed))
    Console().print(json.dumps({"functions": written, "mib": round(out.stat().st_size / 2**20, 2)}))


if __name__ == "__main__":
    typer.run(main)
