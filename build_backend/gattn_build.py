"""scikit-build-core, except that a wheel without kernels gets the tag of pure Python, `py3-none-any`.

With `GATTN_REQUIRE_KERNELS=1`, building such a wheel is an error, which is meant for publishing wheels with kernels.
"""

import os
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 (the other hooks)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """The hook of PEP 517, which returns the name of the file."""
    name = build.build_wheel(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    with ZipFile(wheel) as archive:
        has_kernels = any(Path(file).stem == "_kernels" for file in archive.namelist())
    if has_kernels or name.endswith("-any.whl"):
        return name
    wheel.unlink()
    if os.environ.get("GATTN_REQUIRE_KERNELS", "0") != "0":
        raise SystemExit("GATTN_REQUIRE_KERNELS is set, but no kernels were built: CMake's warning above says why")
    # Metadata that was prepared for the other tag would restore that tag, so it is not passed on.
    return build.build_wheel(wheel_directory, {**(config_settings or {}), "wheel.cmake": "false"})
