"""What `make` installs: `requirements.lock` names every package with its hash.

python tools/dependencies.py lock     resolve constraints.txt with pip into requirements.lock, for this platform
python tools/dependencies.py install  put it into the environment of this Python, and the project beside it
python tools/dependencies.py sbom     print a bill of materials (CycloneDX) of the lock

The lock is for CPython 3.11 on x86-64 Linux and has torch's CPU build. Elsewhere `install` takes the same versions
without hashes and says so. A hash that does not match is an error wherever the lock is used; nothing falls back then.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
WANTED = ".[dev,server]"
PLATFORM = "CPython 3.11 on Linux x86_64"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_LINE = re.compile(r"([A-Za-z0-9._-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")


class Package(NamedTuple):
    name: str
    version: str
    sha256: str

    @property
    def line(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_lock() -> list[Package]:
    """Return the packages of the lock. ValueError for a line that names one without a version or a hash."""
    packages = []
    for line in LOCK.read_text().splitlines():
        if line and not line.startswith("#"):
            found = _LINE.fullmatch(line)
            if found is None:
                raise ValueError(f"{LOCK.name}: not a package with a version and a hash: {line}")
            packages.append(Package(*found.groups()))
    return packages


def this_platform() -> str:
    version = ".".join(platform.python_version_tuple()[:2])
    return f"{platform.python_implementation()} {version} on {platform.system()} {platform.machine()}"


def pip(*arguments: str, check: bool = True) -> int:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, cwd=ROOT, check=check, capture_output=not check).returncode


def lock() -> None:
    """Resolve anew. pip chooses by constraints.txt and its index: read the difference before you commit it."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        pip("--dry-run", "--ignore-installed", "--report", str(report), "-c", "constraints.txt", WANTED, "setuptools")
        write_lock(json.loads(report.read_text())["install"])


def write_lock(installed: list[dict]) -> None:
    found = sorted(_packages(installed), key=lambda package: package.name)
    head = f"# What `make` installs on {this_platform()}; `python tools/dependencies.py lock` makes it anew.\n"
    LOCK.write_text(head + "".join(f"{package.line}\n" for package in found))


def _packages(installed: list[dict]) -> Iterator[Package]:
    for one in installed:
        name, download = one["metadata"]["name"], one["download_info"]
        if "archive_info" in download:  # the project itself is a directory
            sha256 = download["archive_info"]["hashes"]["sha256"]
            yield Package(re.sub(r"[-_.]+", "-", name).lower(), one["metadata"]["version"], sha256)


def install() -> None:
    print("installing the packages of constraints.txt; the first time this takes some minutes", file=sys.stderr)
    if this_platform() != PLATFORM:
        print(f"{LOCK.name} is for {PLATFORM}: the same versions are installed without hashes", file=sys.stderr)
        pip("-c", "constraints.txt", "torch")
        pip("-c", "constraints.txt", "-e", WANTED)
        return
    packages = read_lock()
    torch = next(package for package in packages if package.name == "torch")
    if pip("--dry-run", "--no-deps", f"torch=={torch.version}", check=False):  # whether there is one, whatever its hash
        print(f"no torch {torch.version} in your index: another build is installed without a hash;", file=sys.stderr)
        print(f"PIP_EXTRA_INDEX_URL={TORCH_INDEX} gives you the one that is locked", file=sys.stderr)
        pip("-c", "constraints.txt", "torch")
        packages.remove(torch)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{package.line}\n" for package in packages))
        file.flush()
        pip("--no-deps", "--require-hashes", "-r", file.name)
    pip("--no-deps", "--no-build-isolation", "-e", ".")


def sbom() -> None:
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{package.name}@{package.version}",
            "name": package.name,
            "version": package.version,
            "purl": f"pkg:pypi/{package.name}@{package.version.replace('+', '%2B')}",
            "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        }
        for package in read_lock()
    ]
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/fledge/version.py").read_text())
    about = {"type": "application", "name": "fledge", "version": version[1] if version else "unknown"}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": about}}
    print(json.dumps(bill | {"components": components}, indent=2))


if __name__ == "__main__":
    commands = {function.__name__: function for function in (lock, install, sbom)}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    try:
        commands[sys.argv[1]]()
    except subprocess.CalledProcessError:
        sys.exit(1)  # pip has said why
