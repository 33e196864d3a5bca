"""The library is compiled once, and whoever cannot have it is told so once and goes on without."""

import logging
import stat
from pathlib import Path

import pytest

from fledge.native import library as module

pytestmark = pytest.mark.skipif(module.library() is None, reason="no C compiler here")
library = module.library.__wrapped__  # without its memory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLEDGE_NATIVE", raising=False)
    return tmp_path / "cache/native"


def only_line(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> str:
    (record,) = caplog.records
    assert record.levelno == level
    assert "torch's are" in record.message
    return record.message


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library() is not None
    (made,) = cache.iterdir()
    monkeypatch.setattr(module, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library() is not None
    assert list(cache.iterdir()) == [made]


def test_other_flags_make_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library() is not None
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-DOTHER"))
    assert library() is not None
    assert len(list(cache.iterdir())) == 2


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FLEDGE_NATIVE", "0")
    with caplog.at_level(logging.INFO):
        assert library() is None
    assert "FLEDGE_NATIVE=0" in only_line(caplog, logging.INFO)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert library() is None
    assert "no-such-compiler" in only_line(caplog)


def test_a_compiler_that_fails(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "mycc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho cannot do that >&2\nexit 1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.INFO):
        assert library() is None
    assert "cannot do that" in only_line(caplog)
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO):
        assert library() is None
    only_line(caplog)


def test_a_damaged_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def damage(_compiler: str, path: Path) -> None:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"not a library")

    monkeypatch.setattr(module, "_compile", damage)
    with caplog.at_level(logging.INFO):
        assert library() is None
    only_line(caplog)
