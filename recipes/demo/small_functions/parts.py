"""The parts that functions are made of: where elements come from, conditions, changes and reductions."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipes.demo import jsonlines

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
def parts(kind: str) -> tuple[Any, ...]:
    """The conditions, changes or reductions of `parts.jsonl`."""
    of = {"condition": Condition, "change": Change, "reduction": Reduction}[kind]
    rows = jsonlines.read(Path(__file__).with_suffix(".jsonl"))
    return tuple(of(**{k: v for k, v in row.items() if k != "part"}) for row in rows if row["part"] == kind)
