"""Conversations that ask for small programs, and answers that follow what was asked."""

import ast
import contextlib
import io
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from recipes.demo.small_programs import editing
from recipes.demo.small_programs.program import Program, programs

Message = dict[str, str]

COMMON_REQUESTS = (
    "Write a {language} function that {task}.",
    "Show me a {language} function that {task}.",
    "I need a {language} function that {task}.",
    "Please implement a {language} function that {task}.",
    "Implement, in {language}, a function that {task}.",
    "Can you write a {language} function that {task}?",
    "How would you write a {language} function that {task}?",
)
OTHER_REQUESTS = (
    "Could you write a {language} function that {task}?",
    "Could you please give me a {language} function that {task}?",
    "Please write {language} code that {task}.",
    "Write a small {language} program that {task}.",
    "Give me a {language} function that {task}.",
    "Help me write a {language} function that {task}.",
    "I am learning {language}. How do I write a function that {task}?",
    "I'm looking for a {language} function that {task}.",
    "What is a good way to {base} in {language}?",
    "How can I {base} in {language}?",
    "How do I {base} using {language}?",
    "In {language}, how would I {base}?",
    "Using {language}, {base}.",
    "Create a {language} function to {base}.",
    "Write {language} code to {base}.",
    "I want to {base} in {language}. Can you show me the code?",
    "Hi! Can you help me {base} in {language}?",
    "{language} function that {task}",
    "Hello, I need some {language} code that {task}. Thanks!",
    "For my homework I have to {base} in {language}. Can you help?",
    "Define a function in {language} that {task}.",
    "Show me how to {base} in {language}.",
)
SYSTEM_PROMPTS = (
    "You are an expert programmer.",
    "You write clean, well-documented code.",
    "You are a helpful coding assistant.",
    "You are a patient programming tutor.",
    "You answer with short, correct code.",
    "You are a helpful assistant.",
)
DOCUMENTED, TUTOR, BRIEF = SYSTEM_PROMPTS[1], SYSTEM_PROMPTS[3], SYSTEM_PROMPTS[4]

CONSTRAINTS = {
    "docstring": ("Include a docstring.", "Add a docstring.", "It should have a docstring."),
    "hints": ("Add type hints.", "Use type hints.", "Include type annotations."),
    "generator": ("Use a generator where it makes sense.", "Use a generator."),
    "iterative": ("Avoid recursion.", "Do not use recursion.", "Please solve it without recursion."),
    "recursive": ("Use recursion.", "It should be recursive.", "Please solve it recursively."),
    "short": ("Keep it under 20 lines.", "Keep it short.", "As simple as possible, please."),
    "examples": ("Include a few example calls.", "Show an example.", "Add an example of how to use it."),
    "complexity": ("Explain the time complexity.", "What is its time complexity?", "Also tell me the time complexity."),
    "test": ("Write a short unit test as well.", "Add a unit test.", "Include a test."),
    "libraries": ("Do not use any external libraries.", "Use only the standard library."),
    "empty": ("Handle the case of empty input.", "It should also work for empty input."),
    "comments": ("Comment each step.", "Add comments.", "Please comment the code."),
    "errors": ("Raise a ValueError for invalid input.", "It should raise a ValueError for bad input."),
    "explain": (
        "Explain your solution step by step.",
        "Explain how it works.",
        "Please explain the code.",
        "Add a short explanation.",
    ),
    "only": ("Just the code, please.", "Only show the code.", "No explanation needed."),
}
FOLLOW_UPS = {
    "hints": ("Now add type hints.", "Can you add type hints?", "Please add type annotations."),
    "docstring": ("Now add a docstring.", "Can you add a docstring?", "Please document the function."),
    "comments": ("Can you add comments?", "Please comment the steps.", "Add some comments to the code."),
    "examples": ("Can you show an example?", "How do I use it?", "What does it return, for example?"),
    "explain": ("Explain how it works.", "How does this work?", "Can you explain it?", "I don't understand it."),
    "complexity": ("What is the time complexity?", "How fast is it?", "And the complexity?"),
    "test": ("Can you write a unit test for it?", "Now add a test.", "How can I test this?"),
    "rename": ("Please rename it to `{name}`.", "Can you call the function `{name}` instead?"),
    "recursive": ("Can you do it with recursion?", "Is there a recursive version?"),
    "iterative": ("Can you do it without recursion?", "Is there a version with a loop?"),
    "other": ("Is there another way to do it?", "Can you show me a different solution?"),
    "javascript": ("How would that look in JavaScript?", "Can you do the same in JavaScript?"),
    "thanks": ("Thanks!", "Thank you, that helps.", "Great, thanks a lot!"),
}
INTRODUCTIONS = (
    "Here is a {language} {kind} that {task}:",
    "Here is a {kind} that {task}:",
    "This {kind} {task}:",
    "Sure! Here is a {kind} that {task}:",
    "You can do it like this:",
    "Sure, here is the code:",
    "Here is one way to {base} in {language}:",
    "Here is a simple solution in {language}:",
    "The {kind} `{name}` {task}:",
)
ARGUMENT_NAMES = {
    "text": ("string", "message", "line"),
    "numbers": ("values", "data"),
    "items": ("elements", "entries"),
    "words": ("strings", "terms"),
    "number": ("value", "num"),
    "sentence": ("text", "phrase"),
    "values": ("numbers", "data"),
    "matrix": ("grid", "table"),
    "records": ("rows", "entries"),
    "year": ("y",),
    "word": ("text",),
}


def chat_examples(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations in the form of the chat data. Example i depends on the seed and i only."""
    return [_conversation(random.Random(f"small-programs/{seed}/{index}")) for index in range(count)]


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How a Python solution is written down."""

    program: Program
    variant: int = 0
    hints: bool = False
    docstring: bool = False
    comments: bool = False
    function: str | None = None  # a name other than the program's own
    argument: tuple[str, str] | None = None  # an argument's old and new name

    @property
    def name(self) -> str:
        return self.function or editing.main_definition(self.full).name

    @property
    def full(self) -> str:
        return self.program.python[self.variant]

    @property
    def explanation(self) -> str:
        return (self.program.explanation, *self.program.notes)[self.variant]

    @property
    def is_class(self) -> bool:
        return isinstance(editing.main_definition(self.full), ast.ClassDef)

    def source(self) -> str:
        source = self.full
        if not self.comments:
            source = editing.without_comments(source)
        if not self.docstring:
            source = editing.without_docstrings(source)
        if not self.hints:
            source = editing.without_hints(source)
        if self.argument:
            source = editing.renamed(source, *self.argument)
        return self.calling(source)

    def calling(self, text: str) -> str:
        """Code that uses the function, with the name the function has here."""
        own = editing.main_definition(self.full).name
        return editing.renamed(text, own, self.function) if self.function else text


def _conversation(rng: random.Random) -> dict[str, Any]:
    program = rng.choice(programs())
    messages: list[Message] = []
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    if system:
        messages.append({"role": "system", "content": system})
    if program.javascript and rng.random() < 0.18:
        messages += _javascript_turn(rng, program, system)
    else:
        messages += _python_turns(rng, program, system)
    return {"messages": messages, "source": "small-programs"}


def _python_turns(rng: random.Random, program: Program, system: str | None) -> list[Message]:
    constraint, form = _chosen(rng, program)
    request = _request(rng, program, "Python")
    if rng.random() < 0.2:
        form = _with_own_names(rng, form)
        request = f"{_ended(request)} {_naming(rng, form)}" if form.function or form.argument else request
    form = replace(
        form,
        hints=constraint == "hints" or rng.random() < 0.3,
        docstring=constraint == "docstring" or system == DOCUMENTED or rng.random() < 0.3,
        comments=constraint == "comments" or rng.random() < 0.15,
    )
    if constraint:
        request = f"{_ended(request)} {rng.choice(CONSTRAINTS[constraint])}"
    messages = [_user(request), _assistant(_answer(rng, form, constraint, system))]
    follow_ups = rng.choices((0, 1, 2, 3), weights=(62, 22, 11, 5))[0]
    used = {constraint}
    for _ in range(follow_ups):
        kinds = [kind for kind in _possible_follow_ups(form) if kind not in used]
        kind = rng.choice(kinds)
        used.add(kind)
        form, question, answer = _followed_up(rng, form, kind)
        messages += [_user(question), _assistant(answer)]
        if kind in ("thanks", "javascript"):
            break
    return messages


def _chosen(rng: random.Random, program: Program) -> tuple[str | None, _Form]:
    """A constraint some variant of the program fulfils, and that variant."""
    forms = [_Form(program=program, variant=variant) for variant in range(len(program.python))]
    if rng.random() < 0.3:
        return None, forms[0] if rng.random() < 0.6 else rng.choice(forms)
    for constraint in rng.sample(sorted(CONSTRAINTS), len(CONSTRAINTS)):
        fitting = [form for form in forms if _fulfils(form, constraint)]
        if fitting:
            return constraint, rng.choice(fitting)
    return None, forms[0]


def _fulfils(form: _Form, constraint: str) -> bool:
    source = form.full
    match constraint:
        case "docstring":
            return ast.get_docstring(editing.main_definition(source)) is not None
        case "generator":
            return editing.uses_generator(source)
        case "iterative":
            return not editing.is_recursive(source)
        case "recursive":
            return editing.is_recursive(source)
        case "short":
            return len(source.splitlines()) < 20
        case "examples":
            return len(_examples(source, form.program.check)) > 1
        case "complexity":
            return form.variant == 0
        case "empty":
            return _empty_example(form) is not None
        case "comments":
            return editing.comment_count(source) > 0
        case "errors":
            return "raise ValueError" in source
    return True


def _with_own_names(rng: random.Random, form: _Form) -> _Form:
    """The form with a function or argument name the user asks for, where one can be given safely."""
    if form.is_class:
        return form
    if rng.random() < 0.6:
        name = _other_name(rng, form)
        return replace(form, function=name) if name else form
    for old in editing.parameters(form.full):
        spoken = f"{form.explanation} {form.program.complexity}"
        if old in ARGUMENT_NAMES and not re.search(rf"`[^`]*\b{old}\b", spoken):
            new = rng.choice(ARGUMENT_NAMES[old])
            if editing.can_rename(form.full, old, new):
                return replace(form, argument=(old, new))
    return form


def _other_name(rng: random.Random, form: _Form) -> str | None:
    own = editing.main_definition(form.full).name
    words = re.findall(r"[a-z0-9]+", _base(form.program.task).lower())
    words = [word for word in words if word not in ("a", "an", "the", "of", "is", "its", "with", "in", "to", "s")]
    long, short = "_".join(words[:4]), "_".join(words[:2])
    names = [long, short, long, short, f"my_{own}", f"{own}_simple", f"do_{own}", "solve", "run"]
    names = [name for name in names if name != own and editing.can_rename(form.full, own, name)]
    check_words = set(re.findall(r"\w+", form.program.check))
    names = [name for name in names if name not in check_words]
    return rng.choice(names) if names else None


def _naming(rng: random.Random, form: _Form) -> str:
    if form.function:
        patterns = ("Call it `{}`.", "The function should be called `{}`.", "Name the function `{}`.")
        return rng.choice(patterns).format(form.function)
    old, new = form.argument or ("", "")
    names = [f"`{new if name == old else name}`" for name in editing.parameters(form.full)]
    return f"It should take {_listed(names)}."


def _answer(rng: random.Random, form: _Form, constraint: str | None, system: str | None) -> str:
    source = form.source()
    calls = _example_lines(rng, form) if constraint == "examples" else []
    if constraint == "test" and rng.random() < 0.5:
        source += "\n\n\n" + _unit_test(form)
    elif calls and rng.random() < 0.5:
        source += "\n\n\n" + "\n".join(calls)
        calls = []
    block = _fenced(source)
    if constraint == "only":
        return block
    parts = [_introduction(rng, form.program, "Python", form.name, form.is_class), block]
    if calls:
        parts += ["Example calls:", _fenced("\n".join(calls))]
    if constraint == "test" and "def test_" not in source:
        parts += ["And here is a short unit test:", _fenced(_unit_test(form))]
    if constraint == "explain":
        parts.append(_explanation(rng, form))
    elif system == TUTOR or (system != BRIEF and rng.random() < 0.45):
        parts.append(form.explanation)
    remark = _remark(rng, form, constraint)
    if remark:
        parts.append(remark)
    elif constraint is None and rng.random() < 0.2:
        parts += _spoken_example(rng, form)
    return "\n\n".join(parts)


def _remark(rng: random.Random, form: _Form, constraint: str | None) -> str | None:
    match constraint:
        case "complexity":
            return _complexity(form.program)
        case "errors":
            return rng.choice(("Invalid input raises a `ValueError`.", "For invalid input it raises a `ValueError`."))
        case "empty":
            call, result = _empty_example(form) or ("", None)
            return f"For empty input it works too: `{form.calling(call)}` returns `{result!r}`."
        case "libraries":
            return "It uses only the standard library." if "import " in form.full else "It needs no imports at all."
        case "generator" if "yield" in form.full:
            return "Because it uses `yield`, the values are produced one at a time."
        case "generator":
            return "The generator expression avoids an intermediate list."
    return None


def _possible_follow_ups(form: _Form) -> list[str]:
    kinds = ["explain", "test", "thanks"]
    program = form.program
    if not form.hints and replace(form, hints=True).source() != form.source():
        kinds.append("hints")
    if not form.docstring and _fulfils(form, "docstring"):
        kinds.append("docstring")
    if not form.comments and _fulfils(form, "comments"):
        kinds.append("comments")
    if _examples(form.full, program.check):
        kinds.append("examples")
    if form.variant == 0:
        kinds.append("complexity")
    if not form.is_class and not form.function and not form.argument:
        kinds.append("rename")
    if program.javascript:
        kinds.append("javascript")
    if len(program.python) > 1 and not form.function and not form.argument:
        now = editing.is_recursive(form.full)
        others = {editing.is_recursive(source) for i, source in enumerate(program.python) if i != form.variant}
        kinds.append("other")
        if (not now) in others:
            kinds.append("iterative" if now else "recursive")
    return kinds


def _followed_up(rng: random.Random, form: _Form, kind: str) -> tuple[_Form, str, str]:
    """The form after a further request, the request and the answer."""
    question = rng.choice(FOLLOW_UPS[kind])
    program = form.program
    match kind:
        case "hints" | "docstring" | "comments":
            form = replace(form, **{kind: True})
            noun = {"hints": "type hints", "docstring": "a docstring", "comments": "comments"}[kind]
            opening = rng.choice((f"Here is the code with {noun}:", f"Sure, with {noun} it looks like this:"))
            return form, question, f"{opening}\n\n{_fenced(form.source())}"
        case "examples":
            return form, question, "\n\n".join(_spoken_example(rng, form))
        case "explain":
            return form, question, _explanation(rng, form)
        case "complexity":
            return form, question, _complexity(program)
        case "test":
            opening = rng.choice(("Here is a short unit test:", "You can test it like this:"))
            return form, question, f"{opening}\n\n{_fenced(_unit_test(form))}"
        case "rename":
            name = _other_name(rng, form)
            if name is None:
                return _followed_up(rng, form, "thanks")
            form = replace(form, function=name)
            answer = f"Sure, now it is called `{name}`:\n\n{_fenced(form.source())}"
            return form, question.format(name=name), answer
        case "recursive" | "iterative" | "other":
            fitting = [i for i in range(len(program.python)) if i != form.variant]
            if kind != "other":
                fitting = [i for i in fitting if editing.is_recursive(program.python[i]) == (kind == "recursive")]
            form = replace(form, variant=rng.choice(fitting))
            opening = {
                "recursive": "Here is a recursive version:",
                "iterative": "Here is a version without recursion:",
                "other": "Yes, here is another solution:",
            }[kind]
            return form, question, f"{opening}\n\n{_fenced(form.source())}\n\n{form.explanation}"
        case "javascript":
            opening = rng.choice(("In JavaScript it looks like this:", "Here is the same in JavaScript:"))
            return form, question, f"{opening}\n\n{_fenced(program.javascript or '', 'javascript')}"
    answers = (
        "You're welcome! Let me know if you need anything else.",
        "You're welcome! Happy coding.",
        "Glad to help!",
    )
    return form, question, rng.choice(answers)


def _javascript_turn(rng: random.Random, program: Program, system: str | None) -> list[Message]:
    source = program.javascript or ""
    name = javascript_name(source)
    examples = javascript_examples(program)
    recursive = len(re.findall(rf"\b{name}\(", source)) > 1
    constraints = ["short", "libraries", "only", "recursive" if recursive else "iterative"]
    if len(examples) > 1:
        constraints.append("examples")
    constraint = rng.choice(constraints) if rng.random() < 0.5 else None
    if constraint == "libraries" and "require(" in source:
        constraint = None
    request = _request(rng, program, "JavaScript")
    if constraint:
        request = f"{_ended(request)} {rng.choice(CONSTRAINTS[constraint])}"
    if constraint == "only":
        return [_user(request), _assistant(_fenced(source, "javascript"))]
    is_class = source.startswith("class ")
    parts = [_introduction(rng, program, "JavaScript", name, is_class)]
    lines = [f"console.log({call}); // {result}" for call, result in examples[:3]]
    if constraint == "examples":
        parts.append(_fenced(source + "\n\n" + "\n".join(lines), "javascript"))
    else:
        parts.append(_fenced(source, "javascript"))
        if examples and system != BRIEF and rng.random() < 0.4:
            parts.append("For example, `{}` returns `{}`.".format(*rng.choice(examples)))
    return [_user(request), _assistant("\n\n".join(parts))]


def _request(rng: random.Random, program: Program, language: str) -> str:
    pattern = rng.choice(COMMON_REQUESTS if rng.random() < 0.5 else OTHER_REQUESTS)
    return pattern.format(language=language, task=program.task, base=_base(program.task))


def _introduction(rng: random.Random, program: Program, language: str, name: str, is_class: bool) -> str:
    return rng.choice(INTRODUCTIONS).format(
        language=language,
        kind="class" if is_class else "function",
        task=program.task,
        base=_base(program.task),
        name=name,
    )


def _base(task: str) -> str:
    """The task in the infinitive: "checks whether ..." becomes "check whether ..."."""
    verb, rest = task.split(" ", maxsplit=1)
    if verb.endswith("ies"):
        verb = verb[:-3] + "y"
    elif verb.endswith(("ches", "shes")) and not verb.endswith("aches"):
        verb = verb[:-2]
    else:
        verb = verb.removesuffix("s")
    return f"{verb} {rest.replace(' and returns ', ' and return ')}"


def _explanation(rng: random.Random, form: _Form) -> str:
    steps = re.split(r"(?<=[.!?]) (?=[A-Z`])", form.explanation)
    if len(steps) == 1 or rng.random() < 0.4:
        return form.explanation
    opening = rng.choice(("Step by step:", "How it works:", "Here is what happens:"))
    return opening + "\n\n" + "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))


def _complexity(program: Program) -> str:
    return f"The time complexity is {program.complexity}."


def _unit_test(form: _Form) -> str:
    check = form.calling(form.program.check)
    check = re.sub(r"\n{2,}", "\n\n", check)
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", form.name).lower()
    return f"def test_{name}():\n" + "\n".join(f"    {line}" if line else "" for line in check.splitlines())


def _example_lines(rng: random.Random, form: _Form) -> list[str]:
    examples = [(call, str(result)) for call, result in _examples(form.full, form.program.check)]
    examples = [(form.calling(call), result) for call, result in examples if result and "\n" not in result]
    chosen = examples[: rng.choice((2, 3))]
    return [f"print({call})  # {result}" for call, result in chosen]


def _spoken_example(rng: random.Random, form: _Form) -> list[str]:
    examples = _examples(form.full, form.program.check)
    if not examples:
        return []
    lines = _example_lines(rng, form)
    if lines and rng.random() < 0.5:
        return [
            rng.choice(("For example:", "Here is an example:", "You can call it like this:")),
            _fenced("\n".join(lines)),
        ]
    call, result = rng.choice(examples)
    return [f"For example, `{form.calling(call)}` returns `{result!r}`."]


def _empty_example(form: _Form) -> tuple[str, Any] | None:
    """A call with an empty string, list or dictionary as its first argument, and its result."""
    for call, result in _examples(form.full, form.program.check):
        if re.match(r"(?:list\()?\w+\((?:\"\"|\[\]|\{\})[,)]", call):
            return call, result
    return None


@cache
def _examples(source: str, check: str) -> tuple[tuple[str, Any], ...]:
    """The calls in the assertions that need nothing but the program, with the results they have when run."""
    if any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "print" for node in ast.walk(editing.parsed(source))
    ):
        return ()
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    known = {*namespace, "len", "list", "round", "sorted", "sum"}
    examples = []
    for statement in ast.parse(check).body:
        call = _asserted_call(statement)
        text = ast.get_source_segment(check, call) if call else None
        if call is None or text is None:
            continue
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        if names <= known:
            with contextlib.redirect_stdout(io.StringIO()):
                result = eval(text, namespace)
            if not isinstance(result, set) and len(text) + len(repr(result)) <= 110:
                examples.append((text, result))
    return tuple(examples)


def _asserted_call(statement: ast.stmt) -> ast.Call | None:
    if not isinstance(statement, ast.Assert):
        return None
    test: ast.expr = statement.test
    if isinstance(test, ast.UnaryOp):
        test = test.operand
    elif isinstance(test, ast.Compare):
        if not isinstance(test.ops[0], (ast.Eq, ast.Is)):
            return None
        test = test.left
    return test if isinstance(test, ast.Call) else None


def javascript_name(source: str) -> str:
    """The name of the last function or class at the top level."""
    return re.findall(r"^(?:(?:async )?function\*?|class) (\w+)", source, flags=re.MULTILINE)[-1]


def javascript_examples(program: Program) -> list[tuple[str, str]]:
    """The examples of the first Python variant in JavaScript's notation, where plain values go in and come out."""
    source = program.javascript or ""
    if not re.search(r"^function \w", source, flags=re.MULTILINE):
        return []
    own = editing.main_definition(program.python[0]).name
    examples = []
    for text, result in _examples(program.python[0], program.check):
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == own and not call.keywords:
            with contextlib.suppress(ValueError, TypeError):
                arguments = [_json(ast.literal_eval(argument)) for argument in call.args]
                examples.append((f"{javascript_name(source)}({', '.join(arguments)})", _json(result)))
    return examples


def _json(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, list) and value and all(isinstance(item, float) and item.is_integer() for item in value):
        value = [int(item) for item in value]
    return json.dumps(value)


def _fenced(source: str, language: str = "python") -> str:
    return f"```{language}\n{source}\n```"


def _ended(request: str) -> str:
    return request if request[-1] in ".?!" else request + "."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
