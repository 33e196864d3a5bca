"""Compiles the C sources beside this file. `setup.py` runs this file too, so it imports the standard library only."""

import hashlib
import shlex
import subprocess
from pathlib import Path

# Without this --param, GCC's tuning for AMD processors fuses multiply-adds in some loops and not in others, and bits of
# a row would depend on the size of the batch.
FLAGS = ("-O3", "--param=avoid-fma-max-bits=0", "-fno-math-errno", "-std=gnu11", "-fopenmp", "-shared", "-fPIC")
# Instruction sets of the libraries in a wheel, by torch's names of CPU capabilities.
PREBUILT = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
}
COMPILE_SECONDS = 120
_HERE = Path(__file__).parent
_SEAL_BYTES = hashlib.sha256().digest_size


def sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(_HERE.glob("*.[ch]"))}


def prebuilt_key() -> str:
    """The key of libraries in a wheel: a library of other sources or flags has another one and is not used."""
    return repr((sources(), FLAGS, PREBUILT))


def compile_library(compiler: str, path: Path, key: str, *instructions: str) -> None:
    """Compile to `path`, with a digest for `is_sealed`. OSError without a compiler, SubprocessError if it fails."""
    files = [str(source) for source in sorted(_HERE.glob("*.c"))]
    command = [*shlex.split(compiler), *FLAGS, *instructions, *files, "-o", str(path), "-lm"]
    subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_SECONDS)
    with path.open("ab") as file:  # the loader ignores what follows the end of an ELF file
        file.write(_seal(path.read_bytes(), key))


def is_sealed(path: Path, key: str) -> bool:
    """Whether `compile_library` wrote this file for `key` and it is complete: loading a truncated library crashes."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES], key)


def _seal(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
