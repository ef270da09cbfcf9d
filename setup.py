"""Builds the compiled loops; everything else stands in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("proto", "native")
BUILD = runpy.run_path(str(FOLDER / "build.py"))


class BuildLoops(build_ext):
    """One library for all versions of Python: it uses nothing of Python's."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file of the library."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile it."""
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        BUILD["build"](out)


class PlatformWheel(bdist_wheel):
    """A wheel for the platform, not for a version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: any Python 3, this platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "kvstore.proto.native._loops",
            sources=[str(FOLDER / f"{name}.c") for name in ("paths", *BUILD["SOURCES"])],
            depends=[str(FOLDER / "loops.h"), str(FOLDER / "build.py")],
        )
    ],
    cmdclass={"build_ext": BuildLoops, "bdist_wheel": PlatformWheel},
)
