"""How a wheel is tagged. It is built from a copy, with what stands in the way of a compiler or in place of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("cmake", "ninja")
BUILT = """
cmake_minimum_required(VERSION 3.18)
project(gattn LANGUAGES NONE)
file(WRITE ${CMAKE_BINARY_DIR}/_kernels.so "compiled")
install(FILES ${CMAKE_BINARY_DIR}/_kernels.so DESTINATION gattn/ops/backends/cpu)
"""

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="links to programs"),
    pytest.mark.skipif(None in map(shutil.which, TOOLS), reason="needs CMake and Ninja"),
]


@pytest.fixture
def build(tmp_path):
    """Builds a wheel where there is no compiler; returns the process, the wheels and the files in the last one."""
    source, programs, wheels = tmp_path / "source", tmp_path / "programs", tmp_path / "wheels"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("gattn", "build_backend"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    programs.mkdir()
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))
    wheels.mkdir()

    def build(cmake_lists=None, **environment):
        if cmake_lists is not None:
            (source / "gattn/ops/backends/cpu/csrc/CMakeLists.txt").write_text(cmake_lists)
        code = f"import gattn_build; gattn_build.build_wheel({str(wheels)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=source,
            env={"PATH": str(programs), "PYTHONPATH": "build_backend", **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        found = sorted(wheels.iterdir())
        return done, [wheel.name for wheel in found], ZipFile(found[-1]).namelist() if found else []

    return build


def test_without_a_compiler(build):
    done, wheels, files = build()
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler" in done.stdout + done.stderr
    assert [name.split("-", 2)[2] for name in wheels] == ["py3-none-any.whl"]
    assert "gattn/ops/backends/cpu/native.py" in files
    assert not any("_kernels" in name or "csrc" in name or "gattn_build" in name for name in files)


def test_with_kernels(build):
    done, wheels, files = build(BUILT)
    assert done.returncode == 0, done.stderr
    assert len(wheels) == 1
    _, _, python, abi, platform = wheels[0].removesuffix(".whl").split("-")
    assert (python, abi) == ("py3", "none")
    assert platform != "any"
    assert "gattn/ops/backends/cpu/_kernels.so" in files


def test_kernels_that_are_required(build):
    done, wheels, _ = build(GATTN_REQUIRE_KERNELS="1")
    assert done.returncode != 0
    assert "GATTN_REQUIRE_KERNELS is set, but no kernels were built" in done.stderr
    assert wheels == []
