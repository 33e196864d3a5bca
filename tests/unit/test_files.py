"""Files and directories take their names when they are whole, and not before; compressed ones are read as they are."""

import gzip
import lzma
from pathlib import Path

import pytest

from fledge.errors import FledgeError
from fledge.files import atomic_directory, read_bytes


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
