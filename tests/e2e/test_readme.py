"""The README's commands and Python are run, in order, on the bundled models: they cannot rot."""

import contextlib
import re
import shlex
import time
import urllib.request
from pathlib import Path

import pytest

from tests.command_line import fledge
from tests.forking import ForkedCommand
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOT_RUN = {
    "make": "runs this test, or trains for minutes; its targets are checked to exist",
    "pip": "needs the network",
    "python": "only `python -m venv` and `python -m pip`, which need the network",
}
SHELL_SYNTAX = {"|", "||", "&&", ";", "&", ">", ">>", "<"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Every command of the bash blocks, as words; comments dropped, continued lines joined."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_command(words: list[str], directory: Path) -> None:
    assert not SHELL_SYNTAX & set(words), f"cannot be run by this test: {shlex.join(words)}"
    if words[:2] == ["fledge", "serve"]:
        serve(words[2:], directory)
        return
    if words[0] == "fledge":
        done = fledge(*words[1:], cwd=directory)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"{shlex.join(words)} printed nothing"
        return
    assert words[0] in NOT_RUN, f"a command that this test does not know: {shlex.join(words)}"
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"the Makefile has no such target: {shlex.join(words)}"
    if words[0] == "python":
        assert words[1:3] in (["-m", "venv"], ["-m", "pip"]), f"should be run, not skipped: {shlex.join(words)}"


def serve(options: list[str], directory: Path) -> None:
    """Start the service, wait until it is well, and end it as systemd would."""
    port = free_port()
    process = ForkedCommand("serve", *options, "--port", str(port), cwd=directory)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                assert answer.status == 200
                break
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        else:
            pytest.fail("it never answered")
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(name="newcomer", scope="module")
def _newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory, with the recipes beside it that the README names."""
    root: Path = tmp_path_factory.mktemp("newcomer")
    (root / "recipes").symlink_to(ROOT / "recipes")
    return root


@pytest.mark.usefixtures("_blank_pictures")
def test_commands_run(newcomer: Path) -> None:
    found = commands(README)
    assert {words[1] for words in found if words[0] == "fledge"} >= {"generate", "inspect", "convert"}
    assert ["make", "demo"] in found
    for words in found:
        run_command(words, newcomer)


def test_python_runs(newcomer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks(README, "python")
    assert found
    names: dict[str, object] = {}
    with contextlib.chdir(newcomer):
        for block in found:
            exec(compile(block, "README.md", "exec"), names)
    assert capsys.readouterr().out.strip()


def test_every_block_is_of_a_kind_that_is_checked_or_shown() -> None:
    kinds = re.findall(r"^```(\w*)\n.*?^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert set(kinds) <= {"bash", "python", "text"}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize(
    "text",
    [
        "fledge generate --target build/nowhere hello",
        "fledge fly",
        "curl localhost",
        "make coffee",
        "python -m fledge",
        "fledge inspect fledgling | head",
    ],
)
def test_a_readme_that_has_rotted_fails(newcomer: Path, text: str) -> None:
    (words,) = commands(f"```bash\n{text}  # comment\n```\n")
    with pytest.raises(AssertionError):
        run_command(words, newcomer)
