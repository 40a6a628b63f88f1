"""The page: template, style and scripts put together into one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from functools import cache
from importlib.resources import files
from typing import Any

from gattn.visualize.explorer.encoding import json_in_html

__all__ = ["build"]

_LIBRARIES = (  # each after those that it uses
    *("color", "dispatch", "ease", "quadtree", "selection", "timer"),
    *("interpolate", "force", "drag", "transition", "zoom"),
)
_SCRIPTS = ("data", "measures", "layout", "graph", "arcs", "matrix", "details", "export", "overview", "main")


def build(title: str, data: dict[str, Any]) -> str:
    """Returns the page as HTML."""
    style = _read("explorer.css")
    libraries = "\n".join(_read(f"d3/d3-{name}.min.js") for name in _LIBRARIES)
    script = "\n".join(["(() => {", '"use strict";', *(_read(f"{name}.js") for name in _SCRIPTS), "})();"])
    # Nothing but these two scripts runs, and nothing is fetched or sent.
    policy = (
        f"default-src 'none'; script-src {_source(libraries)} {_source(script)}; style-src {_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(str(title)),
        "licence": _read("d3/LICENSE"),
        "style": style,
        "data": json_in_html(data),
        "libraries": libraries,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("explorer.html"))


@cache
def _read(name: str) -> str:
    return (files("gattn.visualize.explorer") / "page" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """The name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
