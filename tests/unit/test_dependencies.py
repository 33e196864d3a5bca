"""The lock names what the project needs, with hashes, at the versions that are tested; the SBOM follows from it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools import dependencies

ROOT = Path(__file__).parents[2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(name="locked")
def _locked() -> dict[str, str]:
    return {package.name: package.version for package in dependencies.read_lock()}


def test_everything_that_is_needed_is_locked(locked: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [
        *project["project"]["dependencies"],
        *extras["dev"],
        *extras["server"],
        *project["build-system"]["requires"],
    ]
    for requirement in needed:
        found = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert found is not None
        assert canonical(found[0]) in locked, f"python tools/dependencies.py lock: {requirement} is not locked"


def test_it_has_the_versions_that_constraints_has(locked: dict[str, str]) -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            assert locked[canonical(name)].split("+")[0] == version.strip(), name


def test_a_line_without_a_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "LOCK", tmp_path / "lock")
    (tmp_path / "lock").write_text("numpy==2.4.6\n")
    with pytest.raises(ValueError, match=r"not a package with a version and a hash: numpy==2.4.6"):
        dependencies.read_lock()


@pytest.mark.parametrize("has_torch", [True, False])
def test_what_is_installed_where_the_lock_fits(monkeypatch: pytest.MonkeyPatch, has_torch: bool) -> None:
    calls: list[str] = []

    def pip(*arguments: str, check: bool = True) -> int:
        listed = Path(arguments[-1]).read_text() if "--require-hashes" in arguments else ""
        calls.append(" ".join(arguments) + listed)
        return 0 if check else int(not has_torch)

    monkeypatch.setattr(dependencies, "pip", pip)
    monkeypatch.setattr(dependencies, "this_platform", lambda: dependencies.PLATFORM)
    dependencies.install()
    (hashed,) = (call for call in calls if "--require-hashes" in call)
    assert "numpy==" in hashed
    assert ("torch==" in hashed) == has_torch
    assert ("-c constraints.txt torch" in calls) == (not has_torch)
    assert calls[-1] == "--no-deps --no-build-isolation -e ."


def test_elsewhere_versions_are_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dependencies, "pip", lambda *arguments: calls.append(" ".join(arguments)))
    monkeypatch.setattr(dependencies, "this_platform", lambda: "CPython 3.13 on Darwin arm64")
    dependencies.install()
    assert calls == ["-c constraints.txt torch", "-c constraints.txt -e .[dev,server]"]
    assert "without hashes" in capsys.readouterr().err


def test_make_installs_by_the_lock() -> None:
    assert "tools/dependencies.py install" in (ROOT / "Makefile").read_text()


def test_the_bill_of_materials_is_the_lock() -> None:
    command = [sys.executable, "tools/dependencies.py", "sbom"]
    bill = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    found = {(c["name"], c["version"], c["hashes"][0]["content"]) for c in bill["components"]}
    assert found == set(dependencies.read_lock())
    assert all(c["purl"].startswith("pkg:pypi/") and "+" not in c["purl"] for c in bill["components"])
