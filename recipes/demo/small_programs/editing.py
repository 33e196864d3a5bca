"""Cuts type hints, docstrings and comments out of Python sources, and renames what they define.

The edits work on the text at the positions the parser reports, so that everything else keeps its layout.
"""

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Iterable
from functools import cache

Edit = tuple[int, int, str]  # start and end as offsets, and the new text


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def main_definition(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """The function or class a source is about: the last function at the top level, or else the last class."""
    body = parsed(source).body
    functions = [node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return functions[-1] if functions else [node for node in body if isinstance(node, ast.ClassDef)][-1]


def parameters(source: str) -> list[str]:
    """The names of the arguments of the main function; none for a class."""
    node = main_definition(source)
    return [] if isinstance(node, ast.ClassDef) else [arg.arg for arg in node.args.args]


def is_recursive(source: str) -> bool:
    """Whether any function in the source calls itself by name."""
    functions = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.FunctionDef)]
    return any(
        isinstance(node, ast.Name) and node.id == function.name
        for function in functions
        for statement in function.body
        for node in ast.walk(statement)
    )


def uses_generator(source: str) -> bool:
    kinds = (ast.Yield, ast.YieldFrom, ast.GeneratorExp)
    return any(isinstance(node, kinds) for node in ast.walk(parsed(source)))


def comment_count(source: str) -> int:
    return sum(line.lstrip().startswith("#") for line in source.splitlines())


def without_hints(source: str) -> str:
    edits: list[Edit] = []
    starts = _line_starts(source)
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            end = _end(node.annotation, starts)
            if source.startswith(" = ", end):
                edits.append((end, end + 3, "="))
            edits.append((_start(node, starts) + len(node.arg), end, ""))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            arrow = source.rindex("->", 0, _start(node.returns, starts))
            edits.append((arrow - 1, _end(node.returns, starts), ""))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            edits.append((_end(node.target, starts), _end(node.annotation, starts), ""))
    return _without_unused_imports(_edited(source, edits))


def without_docstrings(source: str) -> str:
    lines = source.splitlines()
    dropped: set[int] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            last = first.end_lineno or first.lineno
            dropped |= set(range(first.lineno, last + 1))
            if last < len(lines) and not lines[last].strip():
                dropped.add(last + 1)  # the blank line that set the docstring apart
    return "\n".join(line for number, line in enumerate(lines, start=1) if number not in dropped)


def without_comments(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("#"))


def renamed(source: str, old: str, new: str) -> str:
    """The source with a function, class or argument under another name, also where comments and docstrings name it."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    starts = _line_starts(source)
    edits = []
    before = ""
    for token in tokens:
        begin = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        prose = token.type == tokenize.COMMENT or token.string.startswith('"""')
        if token.type == tokenize.NAME and token.string == old and before != ".":
            edits.append((begin, end, new))
        elif prose:
            edits.append((begin, end, re.sub(rf"\b{old}\b", new, token.string)))
        before = token.string
    return _edited(source, edits)


def can_rename(source: str, old: str, new: str) -> bool:
    """Whether the new name is free, and the old one is not inside an f-string (one token before Python 3.12)."""
    if new in re.findall(r"\w+", source) or keyword.iskeyword(new) or hasattr(builtins, new):
        return False
    return not any(re.search(rf"\b{old}\b", source[begin:end]) for begin, end in _f_strings(source))


def _f_strings(source: str) -> Iterable[tuple[int, int]]:
    starts = _line_starts(source)
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.JoinedStr):
            yield _start(node, starts), _end(node, starts)


def _without_unused_imports(source: str) -> str:
    """Drops imported names that only the type hints used."""
    kept = []
    lines = source.splitlines()
    for number, line in enumerate(lines):
        match = re.match(r"(from \S+ import )(.+)$", line)
        if match:
            rest = "\n".join(lines[:number] + lines[number + 1 :])
            names = [name for name in match[2].split(", ") if re.search(rf"\b{name}\b", rest)]
            if names:
                kept.append(match[1] + ", ".join(names))
        else:
            kept.append(line)
    return "\n".join(kept).strip("\n")


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _start(node: ast.expr | ast.arg, starts: list[int]) -> int:
    return starts[node.lineno - 1] + node.col_offset  # sources are ASCII, so bytes are characters


def _end(node: ast.expr | ast.arg, starts: list[int]) -> int:
    return starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or node.col_offset)


def _edited(source: str, edits: list[Edit]) -> str:
    for start, end, text in sorted(edits, reverse=True):
        source = source[:start] + text + source[end:]
    return source
