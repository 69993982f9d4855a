"""Builds raydfl/core/ops/_cpu.so, the operators in C++, if PyTorch and a C++ compiler are there; the package works without it.

Puts the repository's examples into a wheel, as raydfl/examples, for `raydfl init`.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER = Path("raydfl/core/ops/csrc")


class BuildWithExamples(build_py):
    """Copies the examples beside the modules; an editable install finds them in the repository."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if self.editable_mode:
            return
        examples = Path(self.build_lib, "raydfl", "examples")
        shutil.rmtree(examples, ignore_errors=True)  # of an earlier build
        for folder in ("jobs", "tune"):
            shutil.copytree(folder, examples / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy("cluster.yaml", examples)


def operators() -> tuple[list[object], dict[str, type]]:
    """The extension with the compiled operators and the command that builds it, or nothing."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        sys.stderr.write(f"raydfl: no C++ compiler ({compiler}): installing without compiled operators\n")
        return [], {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        sys.stderr.write("raydfl: no PyTorch while building: installing without compiled operators\n")
        return [], {}
    extension = CppExtension(
        "raydfl.core.ops._cpu",
        sorted(str(path) for path in FOLDER.glob("*.cpp")),
        depends=sorted(str(path) for path in FOLDER.glob("*.h")),
        extra_compile_args=["-O3", "-g0", "-Wno-psabi"],
        optional=True,
    )
    return [extension], {"build_ext": BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)}


EXTENSIONS, COMMANDS = operators()
setup(ext_modules=EXTENSIONS, cmdclass={"build_py": BuildWithExamples, **COMMANDS})
