"""Chat examples of source code: short, documented functions that stand alone become requests and answers."""

import ast
import builtins
import doctest
import io
import multiprocessing
import random
import re
import symtable
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import partial

from recipes.demo import jsonlines
from recipes.demo.code_files import SourceFile, shares_words

VERBS = """\
accept add adjust aggregate align append apply approximate assemble assert assign attach average broadcast build cache
calculate call cast change check choose chop classify clean clear clip close collapse collect combine compare compile
compress compute concatenate configure construct contract convert copy count create crop cut cycle decode decompose
decompress decorate decrease decrypt deduce define delete derive describe detect determine differentiate display
divide download draw drop dump duplicate emit encode encrypt ensure enumerate escape estimate evaluate exclude execute
expand extract factor fetch fill filter find fit fix flatten flip fold format gather generate get give group guess
handle hash identify ignore implement import increase increment indent index infer initialize insert inspect integrate
interpolate intersect invert iterate join keep launch limit link list load locate log look make map mark match measure
merge minimize modify monitor move multiply negate normalize open order output pack pad parse partition patch perform
permute pick plot pop prepare prepend pretty print process produce project prune push put quote raise read rebuild
recommend record reduce refine register remove rename render reorder repeat replace report represent request rescale
reset reshape resize resolve restore retrieve return reverse rewrite rotate round run sample save scale scan schedule
search select send separate serialize set shift show shuffle simplify skip slice solve sort split square squeeze stack
start stop store strip subtract sum swap take tell test tile tokenize trace transform translate transpose traverse
trim truncate try turn undo unescape union unpack unquote update use validate verify visit wait walk warn wrap write
yield zip
"""
THIRD_PERSON = {
    verb: f"{verb[:-1]}ies"
    if verb.endswith("y") and verb[-2] not in "aeiou"
    else f"{verb}es"
    if verb.endswith(("s", "sh", "ch", "x", "z", "o"))
    else f"{verb}s"
    for verb in VERBS.split()
}
# An answer may import these and nothing else.
KNOWN_MODULES = """\
numpy torch math re os sys json itertools functools collections operator random string struct time datetime pathlib
typing typing_extensions hashlib base64 io shutil subprocess inspect ast bisect heapq copy textwrap warnings
contextlib dataclasses enum abc types socket threading tempfile glob csv urllib logging statistics decimal fractions
numbers unicodedata difflib fnmatch stat zlib gzip pickle asyncio scipy sympy networkx matplotlib html email platform
traceback weakref calendar locale secrets uuid importlib pandas cmath array queue codecs binascii errno http signal
tarfile zipfile ipaddress mimetypes getpass shlex configparser sqlite3 hmac pprint keyword tokenize ssl select
concurrent multiprocessing argparse xml PIL yaml requests click colorsys ctypes gc sysconfig posixpath ntpath
"""
REQUESTS = (
    "Write a Python function `{name}` that {purpose}.",
    "Write a Python function called `{name}` that {purpose}.",
    "Please write a Python function named `{name}` that {purpose}.",
    "I need a Python function `{name}` that {purpose}.",
    "Can you write a Python function `{name}` that {purpose}?",
    "Implement `{name}` in Python: a function that {purpose}.",
    "Implement a Python function `{signature}` that {purpose}.",
    "How would you write a function `{name}` in Python that {purpose}?",
    "Give me a Python function, `{name}`, that {purpose}.",
    "Show me a Python function `{name}({arguments})` that {purpose}.",
    "Create a function `{name}` in Python. It {purpose}.",
    "Define a Python function `{name}` with the parameters `{arguments}` that {purpose}.",
)
# For a function whose docstring begins with no verb, or that has none: its name must say enough.
NAMED_REQUESTS = (
    "Write a Python function `{signature}`.",
    "Implement `{signature}` in Python.",
    "Show me how to write `{signature}` in Python.",
    "I need a Python function `{name}` with the parameters `{arguments}`.",
    "How could a Python function `{signature}` be written?",
)
INTRODUCTIONS = (
    "Here is a function that {purpose}:",
    "This function {purpose}:",
    "`{name}` {purpose}:",
    "Here is `{name}`, which {purpose}:",
    "Here is a Python function that {purpose}:",
    "The following function {purpose}:",
    "Here is one way to write `{name}`:",
    "Here is an implementation of `{name}`:",
    "You can write `{name}` like this:",
)
NAMED_INTRODUCTIONS = INTRODUCTIONS[-3:]


def purpose_of(docstring: str) -> str | None:
    """Turn a docstring's first sentence into "returns the ..." when it is one readable English sentence."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z0-9)`'\"])[.:](?:\s|$)", paragraph)[0].strip()
    first, _, rest = sentence.partition(" ")
    verb = first.lower()
    if verb.endswith("ly") and rest:  # "recursively merge two dictionaries"
        adverb, (first, _, rest) = f"{verb} ", rest.partition(" ")
        verb = first.lower()
    else:
        adverb = ""
    if verb in THIRD_PERSON:
        verb = THIRD_PERSON[verb]
    elif verb not in THIRD_PERSON.values():
        return None
    if not 16 <= len(sentence) <= 160 or len(rest.split()) < 2:
        return None
    rest = re.sub(r":[a-z:]+:`~?([^`]+)`", r"`\1`", rest).replace("``", "`").replace("`_", "`")
    rest = re.sub(r"\b(and|then|or) return\b", r"\1 returns", rest)
    if re.search(r"[^\x20-\x7e]|>>>|\\|[{}@|]|https?:|\bself\b|\bcls\b|\bTODO\b|deprecated|this (class|module)", rest):
        return None
    return f"{adverb}{verb} {rest.rstrip('. ')}"


def free_names(function: str) -> set[str]:
    """Names a function takes from its module: neither local nor builtin."""
    found: set[str] = set()
    tables = [symtable.symtable(function, "<function>", "exec")]
    while tables:
        table = tables.pop()
        found |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        tables += table.get_children()
    defined = {s.get_name() for s in symtable.symtable(function, "<function>", "exec").get_symbols() if s.is_assigned()}
    return found - defined - set(dir(builtins)) - {"__name__", "__file__"}


def module_imports(tree: ast.Module) -> dict[str, str]:
    """Map each name a module imports absolutely at its top level to the statement that imports it."""
    statements: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                statements[alias.asname or alias.name.split(".")[0]] = f"import {alias.name}" + (
                    f" as {alias.asname}" if alias.asname else ""
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
            for alias in node.names:
                statements[alias.asname or alias.name] = f"from {node.module} import {alias.name}" + (
                    f" as {alias.asname}" if alias.asname else ""
                )
    return statements


def module_helpers(tree: ast.Module, lines: list[str]) -> dict[str, str]:
    """Map the short functions and constants of a module to their source, docstrings left out."""
    helpers: dict[str, str] = {}
    for node in tree.body:
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        length = source.count("\n") + 1
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and len(node.body) > 1 and length <= 30:
            helpers[node.name] = without_docstring(source, node) if ast.get_docstring(node) else source
        elif isinstance(node, ast.Assign) and length <= 4 and isinstance(node.targets[0], ast.Name):
            helpers[node.targets[0].id] = source
    return helpers


def preamble(missing: set[str], imports: dict[str, str], helpers: dict[str, str]) -> tuple[list[str], list[str]] | None:
    """Return the imports and the helpers that define `missing`, helpers' own needs included; None if that cannot be."""
    needed: list[str] = []
    sources: dict[str, str] = {}
    waiting = sorted(missing)
    while waiting:
        name = waiting.pop()
        if name in imports:
            if re.split(r"[ .]", imports[name])[1] not in KNOWN_MODULES.split():
                return None
            needed.append(imports[name])
        elif name in helpers and name not in sources:
            if len(sources) == 3:
                return None
            sources[name] = helpers[name]
            waiting += sorted(free_names(helpers[name]) - {name} - set(sources))
        elif name not in sources:
            return None
    return sorted(set(needed)), list(reversed(sources.values()))


def without_docstring(source: str, node: ast.FunctionDef) -> str:
    """Remove the lines of the docstring; `source` starts at the function's first line."""
    string = node.body[0]
    assert string.end_lineno is not None
    lines = source.splitlines()
    start, end = string.lineno - node.lineno, string.end_lineno - node.lineno
    return "\n".join([*lines[:start], *lines[end + 1 :]])


def comment_lines(source: str) -> int:
    try:
        return sum(t.type == tokenize.COMMENT for t in tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return 0


def standalone_functions(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yield the source of each plain function at the top level and of each static method, as if it stood alone."""
    for outer in tree.body:
        for node in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            if not isinstance(node, ast.FunctionDef):
                continue
            decorators = [ast.unparse(d) for d in node.decorator_list]
            if decorators == (["staticmethod"] if isinstance(outer, ast.ClassDef) else []):
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def docstring_calls(docstring: str, name: str) -> list[str]:
    """The first few examples of a docstring, as lines to write into one: short calls of `name` with their results."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:
        return []
    chosen: list[str] = []
    for example in examples:
        call, result = example.source.strip(), example.want.strip()
        plain = not re.search(r"[^\x20-\x7e]|\\|\"\"\"| at 0x|Traceback|# doctest", call + result)
        if plain and re.search(rf"\b{re.escape(name)}\(", call) and result and len(call) <= 100 and len(result) <= 100:
            chosen += [f">>> {call}", result]
    return chosen[:6]


def with_docstring(source: str, node: ast.FunctionDef, docstring: list[str]) -> str:
    """Put the lines of another docstring in the place of the first statement's; no lines for none."""
    first = node.body[0].lineno - 1
    lines = without_docstring(source, node).splitlines()
    if docstring:
        closing = [] if len(docstring) == 1 else ['    """']
        head = f'    """{docstring[0]}' + ('"""' if len(docstring) == 1 else "")
        rest = [f"    {line}" if line else "" for line in docstring[1:]]
        lines[first:first] = [head, *rest, *closing]
    return "\n".join(lines)


def function_examples(file: SourceFile, rng: random.Random) -> Iterator[tuple[str, jsonlines.Record]]:
    """Yield (name, chat example) for each short, self-contained function of a file that says what it is for."""
    tree = ast.parse(file.text)
    lines = file.text.splitlines()
    imports, helpers = module_imports(tree), module_helpers(tree, lines)
    for original in standalone_functions(tree, lines):
        source = original
        try:
            node = ast.parse(source).body[0]
        except (SyntaxError, IndexError):
            continue
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or node.name == "main":
            continue
        docstring = ast.get_docstring(node) or ""
        arguments = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        if source.count("\n") >= 90 or node.body[0].col_offset != 4 or {"self", "cls", "mcs"} & set(arguments):
            continue
        purpose = purpose_of(docstring)
        if len(node.body) < 2 or (purpose is None and not tells_by_name(node, docstring, arguments)):
            continue
        try:
            before = preamble(free_names(source) - {node.name}, imports, helpers)
        except (SyntaxError, ValueError):
            continue
        if before is None:
            continue
        calls = docstring_calls(docstring, node.name)
        if purpose and calls:
            source = with_docstring(source, node, [purpose_sentence(purpose), "", *calls])
        elif purpose and (len(docstring.splitlines()) > 12 or rng.random() < 0.5):
            # A long docstring is replaced by its first sentence or dropped, so that answers stay short.
            source = with_docstring(source, node, [purpose_sentence(purpose)] if rng.random() < 0.5 else [])
        name = node.name.lstrip("_")
        if node.name != name:
            source = re.sub(rf"\b{re.escape(node.name)}\b", name, source)
        parts = [*(["\n".join(before[0])] if before[0] else []), *before[1], source]
        answer = "\n\n\n".join(parts)
        if not presentable(answer):
            continue
        fields = {
            "name": name,
            "purpose": purpose,
            "arguments": ", ".join(arguments),
            "signature": f"{name}({', '.join(arguments)})",
        }
        requests = (REQUESTS if arguments else REQUESTS[:6]) if purpose else NAMED_REQUESTS
        request = rng.choice(requests).format(**fields)
        introduction = rng.choice(INTRODUCTIONS if purpose else NAMED_INTRODUCTIONS).format(**fields)
        yield (
            name,
            {
                "messages": [
                    {"role": "user", "content": request},
                    {"role": "assistant", "content": f"{introduction}\n\n```python\n{answer}\n```"},
                ],
                "source": f"{'code-examples' if calls else 'code'}/{file.package.name}",
            },
        )


def tells_by_name(node: ast.FunctionDef, docstring: str, arguments: list[str]) -> bool:
    """Whether a function without a purpose in words can be asked for by its name and parameters, or completed."""
    short = len(docstring.splitlines()) <= 12 and docstring.isascii()
    return short and bool(arguments) and "_" in node.name.strip("_") and node.body[-1].lineno > 3


def presentable(answer: str) -> bool:
    """Whether code is short, more than comments, and parses."""
    code_lines = len(answer.splitlines())
    if not 3 <= code_lines <= 40 or len(answer) > 2200 or comment_lines(answer) > code_lines // 3:
        return False
    try:
        ast.parse(answer)
    except SyntaxError:
        return False
    return True


def purpose_sentence(purpose: str) -> str:
    sentence = f"{purpose[0].upper()}{purpose[1:]}".replace('"', "'")
    return sentence if sentence.endswith((".", "'")) else f"{sentence}."


def _examples_of(file: SourceFile, seed: int) -> list[tuple[str, jsonlines.Record]]:
    return list(function_examples(file, random.Random(f"{seed}/{file.package.name}/{file.path}")))


def chat_examples(
    files: list[SourceFile], limit: int, reserved: set[tuple[str, ...]], seed: int, workers: int
) -> list[jsonlines.Record]:
    """At most `limit` examples from functions, one per (name, body), no more than six per name."""
    examples: list[jsonlines.Record] = []
    bodies: set[str] = set()
    names: Counter[str] = Counter()
    with multiprocessing.Pool(workers) as pool:
        parts = pool.imap(partial(_examples_of, seed=seed), files, chunksize=16)
        for name, example in (pair for part in parts for pair in part):
            body = re.sub(r"\W+", "", example["messages"][1]["content"].split("```python")[1])
            if body in bodies or names[name] >= 6:
                continue
            if any(shares_words(m["content"], reserved) for m in example["messages"]):
                continue
            bodies.add(body)
            names[name] += 1
            examples.append(example)
    random.Random(seed).shuffle(examples)
    return examples[:limit]
