"""Code for the bundled target: wheels by their licence, functions as requests, functions made of parts."""

import random
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from recipes.demo import code_files, completions, jsonlines, quality, samples
from recipes.demo.code_files import Package, SourceFile
from recipes.demo.code_functions import function_examples
from recipes.demo.small_functions.__main__ import conversation, conversations
from recipes.demo.small_functions.function import function

MODULE = '''\
import math
from .private import helper


def area(radius):
    """Return the area of a circle with the given radius.

    It is known to be slow.

    >>> area(0)
    0.0
    """
    return math.pi * radius**2


def hidden(x):
    """Return what the helper of this package makes of x."""
    return helper(x)


class Angles:
    @staticmethod
    def to_degrees(angle):
        """Convert an angle in radians to degrees."""
        turns = angle / math.tau
        return 360 * turns
'''


def wheel(folder: Path, name: str, licence: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
        )
        for path, text in files.items():
            archive.writestr(path, text)


def test_wheels_are_read_by_their_licence_and_never_unpacked(tmp_path: Path) -> None:
    files = {"free/angles.py": MODULE, "free/tests/other.py": MODULE, "../escaped.py": MODULE.replace("area", "volume")}
    wheel(tmp_path, "free", "MIT", files)
    wheel(tmp_path, "strict", "GPL-3.0-only", {"strict/angles.py": MODULE})
    skipped: set[str] = set()
    found = list(code_files.from_wheels(tmp_path, 10**6, skipped, workers=1))
    assert {str(f.path) for f in found} == {"free/angles.py", "../escaped.py"}
    assert {(f.package, f.text) for f in found} >= {(Package("free", "1.0", "MIT"), MODULE)}
    assert skipped == {"strict"}
    assert not (tmp_path.parent / "escaped.py").exists()
    # Its sibling is a copy but for one word in each paragraph that is long enough to count.
    assert len(code_files.admitted([*found, *found], 10**6, set())) <= 2
    reserved = set(code_files.word_sequences("the area of a circle with the given radius it is known to"))
    assert [str(f.path) for f in code_files.admitted(found, 10**6, reserved)] == ["../escaped.py"]


def test_a_file_that_is_no_wheel_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.whl").write_bytes(b"PK")
    with pytest.raises(SystemExit, match=r"broken\.whl is not a wheel"):
        code_files._from_wheel(tmp_path / "broken.whl", 10**6)


def test_functions_become_requests_answers_and_completions() -> None:
    file = SourceFile(Package("package", "1.0", "MIT"), PurePosixPath("x.py"), MODULE)
    found = dict(function_examples(file, random.Random(0)))
    assert list(found) == ["area", "to_degrees"]
    request, answer = (m["content"] for m in found["area"]["messages"])
    assert "returns the area of a circle with the given radius" in request
    assert "import math\n\n\ndef area(radius):" in answer
    assert ">>> area(0)\n    0.0\n" in answer  # what shows the function at work stays
    assert "slow" not in answer
    assert found["area"]["source"] == "code-examples/package"
    assert all(samples.parses(record["messages"][1]["content"]) for record in found.values())
    completion = completions.as_completion(found["area"], random.Random(0))
    assert completion is not None
    assert ">>> area(0)" in completion["messages"][0]["content"]
    assert "math.pi" not in completion["messages"][0]["content"]


def test_functions_made_of_parts_do_what_their_examples_say() -> None:
    rng = random.Random(5)
    made = [f for f in (function(rng) for _ in range(60)) if f]
    assert len({f.purpose for f in made}) > 15
    for f in made:
        namespace: dict[str, object] = {}
        exec(f.code(""), namespace)
        assert [repr(eval(call, namespace)) for call, _ in f.calls] == [result for _, result in f.calls]
        assert samples.parses(conversation(f, rng)["messages"][1]["content"])
    reserved = set(code_files.word_sequences("the sum of the numbers in a list that are", 8))
    talks: list[jsonlines.Record] = conversations(20, reserved, seed=2)
    assert not any(code_files.shares_words(m["content"], reserved, 8) for t in talks for m in t["messages"])


def test_answers_that_loop_are_left_out() -> None:
    loop = "It is what it is and it is what it was. "
    assert quality.repeated_share(loop) == 0
    assert quality.repeated_share(loop * 4) == 0.75
    for text, kept in ((loop, True), (loop * 4, False), ("", False)):
        record = {"messages": [{"role": "user", "content": loop * 9}, {"role": "assistant", "content": text}]}
        assert quality.acceptable(record) is kept
