"""scikit-build-core, except that a wheel without kernels is tagged `py3-none-any`, as pure Python is.

`GATTN_REQUIRE_KERNELS=1` makes it an error to build such a wheel, for those who publish wheels with kernels.
"""

import os
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 (the other hooks)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """The hook of PEP 517: returns the file's name."""
    name = build.build_wheel(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    with ZipFile(wheel) as archive:
        has_kernels = any(Path(file).stem == "_kernels" for file in archive.namelist())
    if has_kernels or name.endswith("-any.whl"):
        return name
    wheel.unlink()
    if os.environ.get("GATTN_REQUIRE_KERNELS", "0") != "0":
        raise SystemExit("GATTN_REQUIRE_KERNELS is set, but no kernels were built: CMake's warning above says why")
    # Metadata that was prepared for the other tag would bring it back.
    return build.build_wheel(wheel_directory, {**(config_settings or {}), "wheel.cmake": "false"})
