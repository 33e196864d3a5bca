"""A package called vllm that needs nothing: for all that is ours around the real one."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fledge.vllm_process.finding import VARIABLE


def put(directory: Path, version: str = "0.32.0", **settings: Any) -> dict[str, str]:
    """Write it; return the variables by which Fledge finds it. `settings` as fake_vllm_server.py reads them."""
    package = directory / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("fake_vllm_server.py"), package / "api_server.py")
    about = directory / "site" / f"vllm-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return {"PYTHONPATH": str(directory / "site"), VARIABLE: sys.executable, "FAKE_VLLM": json.dumps(settings)}


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, version: str = "0.32.0", **settings: Any) -> None:
    """Let Fledge find it, in this Python."""
    for name, value in put(directory, version, **settings).items():
        monkeypatch.setenv(name, value)
