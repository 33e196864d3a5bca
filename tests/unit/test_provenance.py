"""Which commit an artefact is said to be of."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fledge import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_of_a_repository_around_an_installed_package_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a virtual environment in a project's folder."""
    installed = tmp_path / "venv" / "fledge" / "provenance.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(installed))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert provenance.git_commit() is None, "no repository"
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "theirs")
    assert provenance.git_commit() is None, "not tracked"
    git(tmp_path, "add", "--force", str(installed))
    git(tmp_path, "commit", "-m", "ours")
    assert provenance.git_commit() == git(tmp_path, "rev-parse", "HEAD")
    installed.write_text("changed")
    assert provenance.git_commit() == git(tmp_path, "rev-parse", "HEAD") + "-dirty"
