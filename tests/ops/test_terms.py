"""The table of tensors, and that what cannot be made from it agrees with it."""

import ctypes
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import gattn
from gattn.ops.backends import cpu
from gattn.ops.backends.cpu import Cpu, native, plan
from gattn.ops.terms import PLACES, SCHEMA, TERMS, Inputs
from tests.cases import make_call

HEADER = Path(cpu.__file__).parent / "csrc" / "arguments.h"
KINDS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "Rows": native.Rows}


def fields_of(struct):
    """The fields of a structure in the header, with their types in ctypes."""
    code = re.sub(r"//.*", "", HEADER.read_text())
    body = re.search(rf"struct {struct} \{{(.*?)\}};", code, re.DOTALL)[1]
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+)([\s*].*)", statement, re.DOTALL).groups()
        is_pointer = names.startswith("*")  # `const void* sink`, whose names have no stars of their own
        for name in names.removeprefix("*").split(","):
            star, name, length = re.fullmatch(r"\s*(\*?)(\w+)(?:\[(\d+)\])?\s*", name).groups()
            found = ctypes.c_void_p if star or is_pointer else KINDS[kind]
            yield name, found if length is None else found * int(length)


@pytest.mark.parametrize("struct", [native.Arguments, native.Rows])
def test_structures_mirror_the_header(struct):
    assert struct._fields_ == list(fields_of(struct.__name__))


def test_kernels_have_arguments_for_every_tensor():
    """A structure of ctypes accepts any attribute, so a field that is missing would go unnoticed."""
    fields = dict(native.Arguments._fields_)
    assert {name for name, term in TERMS.items() if term.read is None} == {"edge_index", "seed"}
    for name, term in TERMS.items():
        if term.read is None:
            continue
        assert fields[name] is ctypes.c_void_p
        for stride in plan._STRIDES.get(term.read, "").split():
            assert fields[f"{name}_{stride}"] is ctypes.c_int64
        if term.differentiable and name not in ("sink", "out_bias"):
            assert fields[f"grad_{name}"] is ctypes.c_void_p
        if term.differentiable:
            kind = name if name in cpu._GRADIENTS else term.letters[0]
            assert kind in cpu._GRADIENTS, f"the CPU backend does not know how to differentiate {name}"


def test_every_tensor_has_a_row():
    hints = get_type_hints(Inputs)
    assert hints.pop("plan") is Any  # no argument of the operator
    assert list(TERMS) == [name for name, hint in hints.items() if hint in (Tensor, Tensor | None)]
    assert [Inputs._fields[place] for place in PLACES.values()] == list(TERMS)
    arguments = [name for name in Inputs._fields if name != "plan"]
    assert [text.split()[1] for text in SCHEMA.split(", ")] == arguments
    for name in ("attention", "triton_attention"):
        declared = getattr(torch.ops.gattn, name).default._schema.arguments
        assert [argument.name for argument in declared] == [*arguments, "keep", "with_weights"]
        assert {argument.name for argument in declared if "Tensor" in str(argument.type)} == set(TERMS)


def test_axes():
    known = set("NMEHGhCVDR2")
    for term in (form for row in TERMS.values() for form in (row, *row.beside.values())):
        assert set(term.letters) <= known
        assert len(set(term.letters)) == len(term.letters)
        assert term.axes in (term.letters, f"*{term.letters}", f"?{term.letters}")
    heads = {name: term.heads for name, term in TERMS.items() if term.heads}
    assert heads == {
        **dict.fromkeys(("query", "key", "value", "vector", "edge", "edge_value", "out_bias"), 2),
        **dict.fromkeys(("bias", "mask", "sink"), 1),
        "edge_projection": 3,
    }
    assert [form.heads for form in TERMS["edge"].beside.values()] == [0, 2]


@pytest.mark.parametrize("channels", [2, 8])
def test_an_edge_that_is_the_value_has_its_channels(channels):
    """Kernels would read beyond the end of narrower edges."""
    x, edge = torch.randn(4, 2, 3), torch.randn(5, 2, 3)
    value, edge_index = torch.randn(4, 2, channels), torch.randint(4, (2, 5))
    for backend in ("auto", "cpu", "reference"):
        with pytest.raises(ValueError, match="edge_value must have one entry per edge"):
            gattn.attend(x, x, value, edge_index, edge=edge, edge_value=edge, backend=backend)
    call = make_call("dot", edge_index, 4, 4, terms=("edge",), channels=3, value_channels=channels)
    inputs = call.operator_inputs(torch.float32, False)._replace(edge_is_value=True)
    assert inputs.edge.size(-1) != channels
    with pytest.raises(ValueError, match="edge has shape"):
        Cpu.operator.run(inputs)
