"""Atomic writes, readers for JSON, JSON Lines and YAML, and digests of files.

Every file that Fledge writes to keep goes through `atomic_path` or `atomic_directory`.
"""

import gzip
import hashlib
import json
import lzma
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import yaml

from fledge.errors import ConfigError, DataError, FledgeError

SEAL_BYTES = hashlib.sha256().digest_size
_DECOMPRESSION_ERRORS = (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile)


def cache_directory() -> Path:
    """The directory for files that can be recomputed: FLEDGE_CACHE, else XDG_CACHE_HOME/fledge, else ~/.cache/fledge.

    For a user without a home directory, a private directory of this user below the system's temporary one.
    """
    if given := os.environ.get("FLEDGE_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "fledge"
    except RuntimeError:  # no home directory, as for an arbitrary user id in a container
        own = Path(tempfile.gettempdir()) / f"fledge-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        if own.is_symlink() or own.stat().st_uid != os.getuid():
            raise FledgeError(f"{own}: belongs to somebody else; set HOME or FLEDGE_CACHE") from None
        return own


def remove_temporaries(directory: Path) -> None:
    """Remove the temporary files that killed writers left in a directory. No other process may be writing there."""
    for left in directory.glob(".*.tmp*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def atomic_path(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; the file is renamed to `path` when the block ends without an error.

    Several processes may write the same `path`: each has its own temporary name, and the last to finish wins. The
    content is synced to disk before the rename. The file gets `mode`, or by default what the umask gives a new file,
    whatever the writer sets (safetensors: 0600).
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=f".tmp{path.suffix}", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        temporary.unlink()  # mkstemp's mode is 0600
        temporary.touch()
        mode = temporary.stat().st_mode if mode is None else mode
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None:  # the error of a full disk does not name the file
            error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new directory beside `path`, renamed to `path` when the block ends without an error.

    Raises FledgeError if `path` exists, unless `replace`: then readers see the old directory, the new one, or briefly
    neither. After an error in the block, `path` is as it was before and nothing else is left.
    """
    if path.exists() and not replace:
        raise FledgeError(f"{path}: already exists; choose another destination or remove it first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    except OSError as error:
        raise FledgeError(f"{path}: cannot be created: {error.strerror}") from None
    try:
        new = beside / "new"  # mkdtemp's mode is 0700; this one follows the umask
        new.mkdir()
        yield new
        if path.exists():
            path.rename(beside / "old")
        new.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def seal(path: Path) -> None:
    """Append the SHA-256 of a file's content to the file, for `check_seal`."""
    with path.open("r+b") as file:
        sha = hashlib.file_digest(file, "sha256")
        file.seek(0, os.SEEK_END)
        file.write(sha.digest())


def check_seal(path: Path, advice: str) -> None:
    """Raise DataError, ending in `advice`, if a file does not end with the SHA-256 of its content (see `seal`)."""
    sha, left = hashlib.sha256(), path.stat().st_size - SEAL_BYTES
    with path.open("rb") as file:
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            sha.update(part)
            left -= len(part)
        if file.read() != sha.digest():
            raise DataError(f"{path}: damaged, its content does not have the digest that it ends with; {advice}")


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is .xz or .gz. Raises ValueError if that fails."""
    try:
        with _open(path) as file:
            return file.read()
    except _DECOMPRESSION_ERRORS as error:
        raise ValueError(f"damaged: {error}") from None


def write_json(path: Path, values: Any) -> None:
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_json_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(map(json_line, values))


def json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, unreadable or holds something else."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def parse_json(text: str | bytes) -> Any:
    """Like json.loads, but too deep nesting and too long numbers raise JSONDecodeError too."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise json.JSONDecodeError(reason, "", 0) from None


def read_yaml(path: Path, text: str | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML file; `text` is the file's content, if it was read already."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8") if text is None else text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of names to values")
    return values


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of a JSON Lines file, .xz, .gz or plain, or of standard input if `-`.

    Blank lines are skipped. Raises DataError with the line number for invalid JSON.
    """
    number = 0
    try:
        opened: Any = nullcontext(sys.stdin) if str(path) == "-" else _open(path)
        with opened as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_json(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise DataError(f"{path}, line {number}: not a JSON value ({reason}); mend or remove the line") from None
    except _DECOMPRESSION_ERRORS as error:
        raise DataError(f"{path}: damaged after line {number} ({error}); fetch the file again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> IO[bytes]:
    opener: Callable[..., IO[bytes]] = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)  # type: ignore[assignment]
    return opener(path, "rb")


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: str | Path) -> str:
    """Sixteen hex digits of the SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Return a short, unique name for each path: its base name, with its parent or a number where ambiguous."""
    names = [Path(path).name for path in paths]
    names = [f"{Path(path).parent.name}/{n}" if names.count(n) > 1 else n for path, n in zip(paths, names, strict=True)]
    return [n if names.count(n) == 1 else f"{n} ({names[: i + 1].count(n)})" for i, n in enumerate(names)]
