"""The library is compiled once, used only if it is ours, whole and right; who cannot have it is told so once."""

import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fledge.native import library as module
from fledge.native.compiler import FLAGS, PREBUILT, compile_library, is_sealed, prebuilt_key

pytestmark = pytest.mark.skipif(module.library() is None, reason="no C compiler here")
library = module.library.__wrapped__  # without its memory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLEDGE_NATIVE", raising=False)
    return tmp_path / "cache/native"


@pytest.fixture(name="compiler", scope="module")
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that is quick: it optimises less, and the products, most of its work, it has compiled already."""
    directory = tmp_path_factory.mktemp("compiler")
    source, made = Path(module.__file__).with_name("matmul.c"), directory / "matmul.o"
    subprocess.run(["cc", *FLAGS, "-march=native", "-O1", "-c", str(source), "-o", str(made)], check=True)
    take = f'for word; do shift; case "$word" in */matmul.c) word={made};; esac; set -- "$@" "$word"; done'
    return make_compiler(directory / "quick-cc", f'{take}\nexec cc "$@" -O1')


@pytest.fixture(name="made", scope="module")
def _made(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a good library in it."""
    directory = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(directory))
        patch.delenv("FLEDGE_NATIVE", raising=False)
        patch.setattr(module, "compile_library", lambda _cc, *given: compile_library(compiler, *given))
        assert library() is not None
    return directory / "native"


@pytest.fixture(name="compiled")
def _compiled(made: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where libraries are compiled from now on; `cache` has a good one already."""
    shutil.copytree(made, cache)
    compiled: list[Path] = []

    def compile_quickly(_compiler: str, path: Path, *_: str) -> None:
        compiled.append(path)
        shutil.copy(next(made.iterdir()), path)

    monkeypatch.setattr(module, "compile_library", compile_quickly)
    return compiled


def make_compiler(path: Path, more: str) -> str:
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{more}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)  # all files are another's


def only_line(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING, says: str = "torch's are") -> str:
    (record,) = caplog.records
    assert record.levelno == level
    assert says in record.message
    assert "\n" not in record.message
    return record.message


def test_it_is_compiled_once(cache: Path, compiled: list[Path]) -> None:
    (made,) = cache.iterdir()
    assert library() is not None
    assert not compiled
    assert list(cache.iterdir()) == [made]


def test_nobody_else_can_write_it(made: Path) -> None:
    (path,) = made.iterdir()
    assert path.stat().st_mode & 0o777 == 0o700
    assert made.stat().st_mode & 0o777 == 0o700


def test_other_flags_make_another_library(cache: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-DOTHER"))
    assert library() is not None
    assert len(compiled) == 1
    assert len(list(cache.iterdir())) == 2


def test_one_that_others_can_write_is_made_anew(cache: Path, compiled: list[Path]) -> None:
    (path,) = cache.iterdir()
    path.chmod(0o777)
    cache.chmod(0o777)
    assert library() is not None
    assert len(compiled) == 1
    assert cache.stat().st_mode & 0o022 == path.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_one_that_another_user_owns_is_made_anew(cache: Path, compiled: list[Path]) -> None:
    (path,) = cache.iterdir()
    os.chown(path, 12345, -1)
    assert library() is not None
    assert len(compiled) == 1
    assert path.stat().st_uid == 0


def test_a_link_is_made_anew(cache: Path, compiled: list[Path], tmp_path: Path) -> None:
    (path,) = cache.iterdir()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert library() is not None
    assert len(compiled) == 1
    assert not path.is_symlink()


def test_a_cache_of_another_user_is_left_alone(
    cache: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give_away(cache, monkeypatch)
    before = {path: path.stat() for path in cache.iterdir()}
    assert library() is not None
    assert "belongs to another user" in only_line(caplog, says="for this process alone")
    assert {path: path.stat() for path in cache.iterdir()} == before
    (path,) = compiled
    assert cache not in path.parents
    assert not path.parent.exists()


@pytest.mark.parametrize("damage", ["half", "one byte", "empty", "not a library", "another's name"])
def test_a_damaged_one_is_made_anew(cache: Path, compiled: list[Path], damage: str) -> None:
    (path,) = cache.iterdir()
    good = path.read_bytes()
    contents = {"half": good[: len(good) // 2], "one byte": good[:5000] + bytes([good[5000] ^ 1]) + good[5001:]}
    contents |= {"empty": b"", "not a library": b"not a library"}
    other = subprocess.run(
        ["cc", "-shared", "-fPIC", "-xc", "-", "-o", "/dev/stdout"], input=b"", capture_output=True, check=False
    )
    path.write_bytes(contents.get(damage, other.stdout))
    assert library() is not None
    assert len(compiled) == 1
    assert path.read_bytes() == good


@pytest.mark.parametrize(("mistake", "symptom"), [("-Dsinf=cosf", "a decoder layer"), ("-Dsqrtf=fabsf", "self-test")])
def test_a_miscompiled_one_is_refused(
    compiler: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mistake: str,
    symptom: str,
) -> None:
    monkeypatch.setenv("CC", make_compiler(tmp_path / "mycc", f'exec {compiler} "$@" {mistake}'))
    assert library() is None
    assert symptom in only_line(caplog)
    assert not list(cache.iterdir())


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FLEDGE_NATIVE", "0")
    with caplog.at_level(logging.INFO):
        assert library() is None
    assert "FLEDGE_NATIVE=0" in only_line(caplog, logging.INFO)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library() is None
    line = only_line(caplog)
    assert "no-such-compiler" in line
    assert "install gcc or set CC" in line


def test_a_compiler_that_fails(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", make_compiler(tmp_path / "mycc", "echo cannot do that >&2\nexit 1"))
    assert library() is None
    assert "cannot do that" in only_line(caplog)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("source", sorted(Path(module.__file__).parent.glob("*.c")), ids=lambda path: path.name)
def test_sources_declare_every_function_they_call(source: Path) -> None:
    """GCC 14 and Clang 16 refuse implicit declarations, which earlier compilers only warn of."""
    command = ["cc", *FLAGS, "-march=native", "-fsyntax-only", "-Werror=implicit-function-declaration", str(source)]
    subprocess.run(command, check=True)


def test_a_compiler_with_arguments(compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "env cc")
    assert library() is not None
    assert len(compiled) == 1


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "file"))
    assert library() is not None
    only_line(caplog, says="for this process alone")
    (path,) = compiled
    assert not path.parent.exists()


def test_a_library_of_the_wheel_needs_no_compiler(
    compiler: str,
    tmp_path: Path,
    compiled: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    capability = module.torch.backends.cpu.get_cpu_capability().lower()
    if capability not in PREBUILT or sys.platform != "linux":
        pytest.skip("wheels have none for this processor")
    prebuilt = tmp_path / f"{capability}.so"
    compile_library(compiler, prebuilt, prebuilt_key(), *PREBUILT[capability])
    monkeypatch.setattr(module, "PREBUILT_DIRECTORY", tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)  # of who runs the tests, and wants that one
    assert library() is not None
    assert not compiled
    prebuilt.write_bytes(prebuilt.read_bytes()[:-100])  # not whole: the compiler is asked, and is not there
    assert library() is None
    assert "install gcc or set CC" in only_line(caplog)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels have libraries for x86-64 only")
def test_a_wheel_has_libraries_for_two_kinds_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")
    compiler = 'while [ "$1" != -o ]; do flags="$flags $1"; shift; done\necho "$flags" > "$2"'
    monkeypatch.setenv("CC", make_compiler(tmp_path / "mycc", compiler))
    tree = Path(__file__).parents[3]
    shutil.copy(tree / "setup.py", tmp_path)
    native = tmp_path / "src/fledge/native"
    native.mkdir(parents=True)
    for path in (tree / "src/fledge/native").glob("*.[chp]*"):
        shutil.copy(path, native)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "fledge"\nversion = "0"\n[tool.setuptools]\npackages = ["fledge.native"]\n'
        'package-dir = {"" = "src"}\n[tool.setuptools.package-data]\n"fledge.native" = ["*.[ch]"]\n'
    )
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for name, flag in (("avx2", "-mavx2"), ("avx512", "-mavx512f")):
        made = tmp_path / f"out/fledge/native/prebuilt/{name}.so"
        assert is_sealed(made, prebuilt_key())
        assert flag in made.read_text(errors="replace").split()
