"""Files and directories take their names when they are whole, and not before; compressed ones are read as they are."""

import gzip
import lzma
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.tensors import write_model
from fledge.errors import CheckpointError, DataError, FledgeError
from fledge.files import atomic_directory, cache_directory, check_seal, read_bytes, read_json_lines, seal, write_text
from tests.command_line import fledge


def fill(path: Path, text: str, *, replace: bool = False) -> None:
    with atomic_directory(path, replace=replace) as new:
        (new / "file").write_text(text)
        assert not path.exists() or replace


def test_a_directory_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    fill(tmp_path / "deep" / "place", "one")
    assert (tmp_path / "deep" / "place" / "file").read_text() == "one"
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "place"]


def test_an_existing_directory_is_refused_or_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "place", "one")
    with pytest.raises(FledgeError, match="place: already exists"):
        fill(tmp_path / "place", "two")
    assert (tmp_path / "place" / "file").read_text() == "one"
    fill(tmp_path / "place", "two", replace=True)
    assert (tmp_path / "place" / "file").read_text() == "two"
    assert list(tmp_path.iterdir()) == [tmp_path / "place"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path / "place", "one")
    for path in (tmp_path / "place", tmp_path / "other"):
        with pytest.raises(FileNotFoundError), atomic_directory(path, replace=True) as new:
            (new / "missing" / "file").write_text("half")
    assert (tmp_path / "place" / "file").read_text() == "one"
    assert list(tmp_path.iterdir()) == [tmp_path / "place"]


def test_a_place_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FledgeError, match="cannot be created"):
        fill(tmp_path / "file" / "place", "one")


def test_compressed_files_are_read_like_others(tmp_path: Path) -> None:
    contents = {"a.json": b"[1]", "a.json.xz": lzma.compress(b"[1]"), "a.json.gz": gzip.compress(b"[1]")}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert read_bytes(tmp_path / name) == b"[1]"
    for name in ("a.json.xz", "a.json.gz"):
        (tmp_path / name).write_bytes(contents[name][:-4])
        with pytest.raises(ValueError, match="damaged"):
            read_bytes(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "b.json.xz")


@contextmanager
def full_disk(at: int = 4096) -> Iterator[None]:
    """No file may grow beyond so many bytes: what a full disk does, for this process alone."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="too large") as refused:
        write_text(tmp_path / "file", "x" * 10_000)
    assert refused.value.filename == str(tmp_path / "file")
    with full_disk(), pytest.raises(CheckpointError, match=r"model: cannot be written: .*too large"):
        write_model(tmp_path / "model", {"a": torch.zeros(10_000)}, {})
    with full_disk(100):
        outcome = fledge("train", "--init", "my.yaml", cwd=tmp_path)
    assert (outcome.returncode, outcome.stderr) == (2, "error: my.yaml: File too large\n")
    assert not list(tmp_path.iterdir())


def test_weights_get_the_mode_of_their_neighbours(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_model(tmp_path / "model", {"a": torch.zeros(10)}, {"config.json": {}})
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model").iterdir()} == {
        "model.safetensors": "0o640",
        "config.json": "0o640",
    }


def test_any_flipped_byte_breaks_the_seal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content := b"some numbers")
    seal(path)
    check_seal(path, "make it again")
    whole = path.read_bytes()
    assert whole.startswith(content)
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(DataError, match=r"file: damaged, .*; make it again"):
            check_seal(path, "make it again")
    path.write_bytes(whole[:5])
    with pytest.raises(DataError, match="damaged"):
        check_seal(path, "make it again")


def test_json_lines_that_nest_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("1\n" + "[" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 2: not a JSON value \(nested too deeply\)"):
        list(read_json_lines(tmp_path / "x.jsonl"))


def test_a_user_without_a_home_has_a_private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FLEDGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = cache_directory()
    assert (own.parent, own.stat().st_mode & 0o777) == (tmp_path, 0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "fledge-12345").mkdir()
    with pytest.raises(FledgeError, match="belongs to somebody else; set HOME or FLEDGE_CACHE"):
        cache_directory()
