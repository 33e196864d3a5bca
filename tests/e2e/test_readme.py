"""The README's commands and Python are run, in order, and so is the demo: neither can rot."""

import contextlib
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.miniature import raising
from examples.miniature.__main__ import main as demo
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from tests.command_line import fledge
from tests.tiny_models import TINY_TARGET, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

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


@pytest.fixture(name="newcomer", scope="module")
def _newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `make demo` leaves it, but with random models."""
    root: Path = tmp_path_factory.mktemp("newcomer")
    models = root / "build" / "miniature"
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    target = make_target(config)
    save_target(target, models / raising.TARGET)
    save_tokenizer(models / raising.TARGET)
    for name, variant in raising.VARIANTS.items():
        save_drafter(make_drafter(variant.config_for(config), target), models / name)
    return root


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
        "fledge inspect build/miniature/target | head",
    ],
)
def test_a_readme_that_has_rotted_fails(newcomer: Path, text: str) -> None:
    (words,) = commands(f"```bash\n{text}  # comment\n```\n")
    with pytest.raises(AssertionError):
        run_command(words, newcomer)


QUICK = ("--steps", "5", "--max-tokens", "6")


def test_the_demo_raises_models_once_and_decodes_losslessly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    command = [sys.executable, "-m", "examples.miniature", *QUICK, "--build-dir", str(models)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Lossless" in done.stdout
    assert "acceptance length" in done.stdout
    for name in raising.VARIANTS:
        checked = fledge("inspect", str(models / name), "--target", str(models / "target"), cwd=tmp_path)
        assert checked.returncode == 0, checked.stdout
        assert "0 errors, 0 warnings" in checked.stdout

    monkeypatch.setattr(raising, "_train", lambda *_: pytest.fail("the models were there already"))
    assert demo([*QUICK, "--build-dir", str(models)]) == 0
    assert "Using the models" in capsys.readouterr().out


def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(raising, "train_drafter", interrupt)
    assert demo([*QUICK, "--build-dir", str(tmp_path / "models")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_overwrites_nothing_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    assert demo([*QUICK, "--build-dir", str(tmp_path)]) == 2
    assert "holds no miniature models" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
