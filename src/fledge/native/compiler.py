"""Compiling the C sources beside this file. The wheel's build runs this file too, so it needs Python alone."""

import hashlib
import shlex
import subprocess
from pathlib import Path

# GCC, tuned for AMD's processors, fuses a multiply-add in one loop and not in another, as it likes. A row would then
# have other bits alone than in company; so it is told to fuse them all.
FLAGS = ("-O3", "--param=avoid-fma-max-bits=0", "-fno-math-errno", "-std=gnu11", "-fopenmp", "-shared", "-fPIC")
# Instructions of the libraries in a wheel, under torch's names for what a processor can do.
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
    """What a library in a wheel is sealed with: one left over from other sources or flags does not fit."""
    return repr((sources(), FLAGS, PREBUILT))


def compile_library(compiler: str, path: Path, key: str, *instructions: str) -> None:
    """Write a sealed library for these instructions. OSError without the compiler, SubprocessError where it fails."""
    files = [str(source) for source in sorted(_HERE.glob("*.c"))]
    command = [*shlex.split(compiler), *FLAGS, *instructions, *files, "-o", str(path), "-lm"]
    subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_SECONDS)
    with path.open("ab") as file:  # after its end, where the loader does not look
        file.write(_seal(path.read_bytes(), key))


def is_sealed(path: Path, key: str) -> bool:
    """Whether a file is what `compile_library` wrote for this key, to the last byte: loading half a library crashes."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES], key)


def _seal(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
