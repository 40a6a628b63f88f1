"""How Sphinx builds the documentation; `build.py` calls it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import mathjax
from docutils import nodes
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

import gattn

project = "gattn"
author = copyright = "The gattn authors"
version = release = gattn.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["README.md"]  # the start page includes it

# Pages and notebooks.
myst_enable_extensions = ["amsmath", "dollarmath", "html_image"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are committed with their outputs, and CI executes them

# Docstrings.
default_role = "name"  # links where it is a name of gattn, and code where it is not
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autosummary_generate = False
napoleon_custom_sections = ["Shapes"]
napoleon_numpy_docstring = False
smartquotes_action = "D"  # dashes, but no quotes: prose may quote code

# Other projects' names are not linked, since that would need the network.
nitpick_ignore_regex = [("py:.*", r"(torch|torch_geometric|numpy|matplotlib|collections|os|pathlib)\..*")]
# Neither are types of annotations that autodoc cannot evaluate, and those of private parameters.
nitpick_ignore_regex += [
    ("py:class", r"Tensor|DeviceMesh|Layers|MessagePassing|Metadata|Module|Path|_\w+|gattn\.distributed\._.*")
]

linkcheck_timeout = 20
linkcheck_anchors = False

# Looks. Nothing is loaded from another server.
html_theme = "furo"
html_title = f"gattn {version}"
html_static_path = ["static", str(Path(mathjax.__file__).parent / "static/mathjax/es5/tex-svg-full.js")]
html_css_files = ["gattn.css"]
mathjax_path = "tex-svg-full.js"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


class NameRole(PyXRefRole):
    """Text between single backticks: a link if it is a public name, and plain code otherwise."""

    def process_link(self, env: BuildEnvironment, node: Element, *link: Any) -> tuple[str, str]:
        """Marks the reference as one that need not be found."""
        node.attributes |= {"refdomain": "py", "reftype": "obj", "is_code": True}
        return super().process_link(env, node, *link)


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement) -> nodes.Node | None:
    """Links the private path of a public object to its public name, and leaves what is plain code."""
    if node["refdomain"] != "py":
        return None
    if node.get("is_code"):
        return text
    name = node["reftarget"].rpartition(".")[2]
    found = [each for each in env.domains.python_domain.objects if each.endswith(f".{name}")]
    if len(found) != 1:
        return None
    return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, text)


def read_as_prose(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keeps napoleon from taking what precedes a colon for a type: gattn's types are in its annotations."""
    starts = [i + 1 for i, line in enumerate(lines) if line.strip() in ("Returns:", "Yields:")]
    if what in ("attribute", "data", "property"):
        starts.insert(0, 0)
    for i in reversed(starts):
        lines.insert(i, " " * (len(lines[i]) - len(lines[i].lstrip())) + "\\")  # an escaped line break


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Links the code in the text of pages that is the name of a class, or the whole name of a function."""
    domain = app.env.domains.python_domain
    known = {name: entry for name, entry in domain.objects.items() if name.count(".") < 3 and not entry.aliased}
    known |= {name.rpartition(".")[2]: entry for name, entry in known.items() if entry.objtype == "class"}
    for code in list(doctree.findall(lambda node: isinstance(node, nodes.literal) and not node["classes"])):
        entry = known.get(code.astext())
        if entry and entry.docname != page and not isinstance(code.parent, nodes.reference | nodes.title):
            url = app.builder.get_relative_uri(page, entry.docname)
            code.replace_self(nodes.reference("", "", code.deepcopy(), internal=True, refuri=f"{url}#{entry.node_id}"))


def skip_generated(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the methods that PyG generates, and puts on a class once it is used."""
    code = getattr(thing, "__code__", None)
    return True if code and not Path(code.co_filename).is_relative_to(Path(gattn.__file__).parent) else None


def break_equations(app: Sphinx, doctree: nodes.document) -> None:
    r"""Puts the parts of a long equation below each other, where `\qquad` stands between them."""
    for equation in doctree.findall(nodes.math_block):
        text = equation.astext()
        parts = re.split(r"\s*\\qquad\s*", text)
        if len(text) > 140 and len(parts) > 1 and r"\begin" not in text:
            equation["no-wrap"] = True
            equation.children[:] = [nodes.Text(r"\begin{gather*}" + r" \\ ".join(parts) + r"\end{gather*}")]


def keep_together(app: Sphinx, doctree: nodes.document) -> None:
    """Keeps a number on one line with its thousands, its unit and its deviation."""
    for text in list(doctree.findall(nodes.Text)):
        whole = re.sub(r"(?<=\d) (?=\d{3}\b|(?:s|ms|µs|[KMG]B|GiB|%)(?!\w)|±)|(?<=±) ", "\u00a0", text)
        code = nodes.literal | nodes.math | nodes.math_block | nodes.raw | nodes.FixedTextElement
        if whole != text and not isinstance(text.parent, code):
            text.parent.replace(text, nodes.Text(whole))


def forget_overloads(app: Sphinx) -> None:
    """Documents each function by one signature, and not by one per type of its result."""
    for module in [name for name in sys.modules if name.startswith("gattn")]:
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_role("name", NameRole())
    app.connect("builder-inited", forget_overloads)
    app.connect("autodoc-process-docstring", read_as_prose, priority=400)  # before napoleon
    app.connect("doctree-resolved", link_names)
    app.connect("autodoc-skip-member", skip_generated)
    app.connect("doctree-read", break_equations)
    app.connect("doctree-read", keep_together)
    app.connect("missing-reference", resolve)
