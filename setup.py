"""Builds raydfl/ops/_cpu.so, the operators in C++, if PyTorch and a C++ compiler are there; the package works without it.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

FOLDER = Path("raydfl/ops/csrc")


def extension() -> dict[str, object]:
    """The arguments of ``setup`` that build the operators, or none."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        sys.stderr.write(f"raydfl: no C++ compiler ({compiler}): installing without compiled operators\n")
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        sys.stderr.write("raydfl: no PyTorch while building: installing without compiled operators\n")
        return {}
    operators = CppExtension(
        "raydfl.ops._cpu",
        sorted(str(path) for path in FOLDER.glob("*.cpp")),
        depends=sorted(str(path) for path in FOLDER.glob("*.h")),
        extra_compile_args=["-O3", "-g0", "-Wno-psabi"],
        optional=True,
    )
    build = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)
    return {"ext_modules": [operators], "cmdclass": {"build_ext": build}}


setup(**extension())
