"""Puts compiled C libraries into wheels that are built on x86-64 Linux; all else is in pyproject.toml."""

import os
import platform
import runpy
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

COMPILER = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")
IS_X86_LINUX = platform.system() == "Linux" and platform.machine() == "x86_64"


class BuildWithLibraries(build_py):
    """Modules and data, and in wheels `native/prebuilt/*.so`. An editable install compiles on first use."""

    def run(self) -> None:
        super().run()
        native = Path(self.build_lib, "fledge", "native")
        shutil.rmtree(native / "prebuilt", ignore_errors=True)
        if self.editable_mode or not IS_X86_LINUX:
            return
        made = runpy.run_path(str(native / "compiler.py"))
        (native / "prebuilt").mkdir()
        try:
            for name, instructions in made["PREBUILT"].items():
                path = native / "prebuilt" / f"{name}.so"
                made["compile_library"](COMPILER, path, made["prebuilt_key"](), *instructions)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(native / "prebuilt")
            self.announce(f"the wheel goes without compiled libraries: {COMPILER}: {error}", level=3)


class WheelOfLibraries(bdist_wheel):
    """A wheel with libraries is for one platform and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return IS_X86_LINUX


commands = {"build_py": BuildWithLibraries, "bdist_wheel": WheelOfLibraries}
setup(cmdclass=commands, distclass=BinaryDistribution)
