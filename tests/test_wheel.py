"""How a wheel is tagged, and what the packages contain.

They are built from a copy, with what stands in the way of a compiler or in place of it.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
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


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def source(tmp_path):
    """A copy of the package."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("gattn", "build_backend"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    return source


def call(hook, source, folder, path=os.environ["PATH"], **environment):
    """Calls a hook of the build backend."""
    return subprocess.run(
        [sys.executable, "-c", f"import gattn_build; gattn_build.{hook}({str(folder)!r})"],
        cwd=source,
        env={"PATH": str(path), "PYTHONPATH": "build_backend", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def build(source, tmp_path):
    """Builds a wheel where there is no compiler; returns the process, the wheels and the files in the last one."""
    programs, wheels = tmp_path / "programs", tmp_path / "wheels"
    programs.mkdir()
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))
    wheels.mkdir()

    def build(cmake_lists=None, **environment):
        if cmake_lists is not None:
            (source / "gattn/ops/backends/cpu/csrc/CMakeLists.txt").write_text(cmake_lists)
        done = call("build_wheel", source, wheels, programs, **environment)
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


def test_the_source_package_has_what_git_has_and_what_describes_it(source, tmp_path):
    shutil.copy(ROOT / ".gitignore", source)
    for file in (".ci/run", "gattn/_kernels.so", "gattn/__pycache__/nn.pyc", "data/cora.npz", "docs/faq.md"):
        (source / file).parent.mkdir(exist_ok=True)
        (source / file).write_text("")
    done = call("build_sdist", source, tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("gattn-*.tar.gz")
    with tarfile.open(package) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
        name = package.name.removesuffix(".tar.gz")
        metadata = message_from_bytes(archive.extractfile(f"{name}/PKG-INFO").read())
    assert files >= {"LICENSE", "README.md", "pyproject.toml", "build_backend/gattn_build.py", "docs/faq.md"}
    assert files >= {f"gattn/{path}" for path in ("__init__.py", "py.typed", "ops/backends/cpu/csrc/CMakeLists.txt")}
    assert not [file for file in files if re.search(r"\.so$|\.pyc$|^data|^\.", file)]
    check_page(metadata.get_payload(), PROJECT["project"].get("urls", {}).get("Repository"))


def check_page(text, address):
    """The README as a package index shows it: no formulas, and nothing that is relative to the repository."""
    assert text.startswith("# gattn")
    assert "$$" not in text
    targets = re.findall(r"(?:\]\(|src=\"|href=\")([^)\"\s]+)", text)
    assert [target for target in targets if "arxiv.org" in target]
    assert all(target.startswith("https://") for target in targets)
    assert "four_graphs.png`" not in text  # a picture that was taken for a link
    assert (address is None) or any(target.startswith(f"{address}/") for target in targets)


def test_what_releasing_says_to_write_once_there_is_an_address():
    builder = pytest.importorskip("hatch_fancy_pypi_readme._builder")
    config = pytest.importorskip("hatch_fancy_pypi_readme._config")
    (lines,) = re.findall(r"```toml\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    written = tomllib.loads(lines.replace("ADDRESS", "example.org/gattn"))["substitutions"]
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    fragments = [{"text": (ROOT / "README.md").read_text()}]
    settings = {**hook, "fragments": fragments, "substitutions": [*hook["substitutions"][:2], *written]}
    config = config.load_and_validate_config(settings)
    page = builder.build_text(config.fragments, config.substitutions, version="1.2.3", package_name="gattn")
    check_page(page, "https://example.org/gattn")
    assert "](https://example.org/gattn/blob/v1.2.3/docs/migrating.md)" in page
    assert "](https://example.org/gattn/raw/v1.2.3/notebooks/pictures/four_graphs.png)" in page
