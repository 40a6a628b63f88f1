"""The package `ogb`, imported only where it is needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["import_ogb"]


def import_ogb(module: str) -> Any:
    """Imports a module of OGB's package, without its thread that looks for a newer version on the network.

    Raises:
        ImportError: If the package is not installed.
    """
    hide_outdated = "ogb" not in sys.modules and "outdated" not in sys.modules
    if hide_outdated:
        sys.modules["outdated"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError("OGB's data sets need its package: pip install ogb.") from error
    finally:
        if hide_outdated:
            del sys.modules["outdated"]
