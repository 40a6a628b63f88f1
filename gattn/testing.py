"""Comparisons, random graphs and invariance checks, for the tests of gattn and for your own.

Example:
    >>> import torch, gattn
    >>> from gattn.testing import assert_permutation_equivariant, random_edge_index
    >>> edge_index = random_edge_index(num_sources=10, num_edges=30, seed=0)
    >>> assert_permutation_equivariant(gattn.nn.GATConv(4, 8), torch.randn(10, 4), edge_index)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from gattn.errors import InputError, InputTypeError, check_number
from gattn.torch_private import graph_breaks

__all__ = [
    "assert_alone_equals_in_batch",
    "assert_as_exact_as",
    "assert_compiles_whole",
    "assert_permutation_equivariant",
    "random_edge_index",
]


def random_edge_index(
    num_sources: int, num_targets: int | None = None, num_edges: int = 0, *, hub: float = 0.0, seed: int = 0
) -> Tensor:
    """A random graph with the features of real ones: duplicate edges, self-loops and isolated nodes.

    Args:
        num_sources: M.
        num_targets: N. (default: M)
        num_edges: E. (default: `0`)
        hub: Share of all edges that point to target 0. (default: `0.0`)
        seed: Seed of the generator, which is separate from PyTorch's. (default: `0`)

    Returns:
        `[2, E]`, sources above targets. The last target has no neighbour, if there is more than one target.

    Example:
        >>> from gattn.testing import random_edge_index
        >>> edge_index = random_edge_index(num_sources=10, num_edges=30, hub=0.5)
        >>> edge_index.shape, int(edge_index[1].max()) < 9
        (torch.Size([2, 30]), True)
    """
    num_targets = num_sources if num_targets is None else num_targets
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    sources = torch.randint(num_sources, (num_edges,), generator=generator)
    targets = torch.randint(max(num_targets - 1, 1), (num_edges,), generator=generator)
    targets[torch.rand(num_edges, generator=generator) < hub] = 0
    return torch.stack([sources, targets])


def assert_as_exact_as(
    actual: Tensor,
    peer: Tensor,
    exact: Tensor,
    *,
    factor: float = 4.0,
    scale: float | None = None,
    name: str = "result",
) -> None:
    r"""Asserts that `actual` is no further from the exact result than a peer is, up to a small factor.

    .. math::
        \max |\mathrm{actual} - \mathrm{exact}| \le f \max |\mathrm{peer} - \mathrm{exact}| + 8 \, \epsilon \, s

    The tolerance is derived, not tuned: it is the largest error of the peer in this type, times the factor :math:`f`,
    and a few units in the last place of a number of size :math:`s`.

    Args:
        actual: The result under test, `[...]`.
        peer: The same result from the reference in the same type, `[...]`.
        exact: The same result from the reference in float64, `[...]`.
        factor: The factor :math:`f`. (default: `4.0`)
        scale: The magnitude :math:`s` of the terms that were summed, if that is more than the result's own.
            (default: `None`, the largest element of `exact`)
        name: The name of the result in the message. (default: `"result"`)

    Raises:
        AssertionError: If shapes or types differ, or the error exceeds the tolerance.

    Example:
        >>> import torch
        >>> from gattn.testing import assert_as_exact_as
        >>> x = torch.randn(1000, dtype=torch.float64)
        >>> assert_as_exact_as(x.float().flip(0).sum(), peer=x.float().sum(), exact=x.sum(), scale=x.abs().sum().item())
    """
    if actual.shape != peer.shape or actual.dtype != peer.dtype:
        raise AssertionError(
            f"{name} is {actual.dtype} of shape {list(actual.shape)}, expected {peer.dtype} of {list(peer.shape)}"
        )
    if actual.numel() == 0:
        return
    exact = exact.double()
    scale = exact.abs().max().item() if scale is None else scale
    floor = 8 * torch.finfo(actual.dtype).eps * scale
    budget = factor * (peer.double() - exact).abs().max().item() + floor
    error = (actual.double() - exact).abs().max().item()
    if not error <= budget:  # so that NaN fails
        raise AssertionError(f"{name} is off by {error:.3g}; the reference's own error allows {budget:.3g}")


def assert_permutation_equivariant(
    module: Callable[..., Tensor], x: Tensor, edge_index: Tensor, *, seed: int = 0, **kwargs: Any
) -> None:
    """Asserts that permuting nodes permutes the output, and that permuting edges changes nothing.

    Args:
        module: Called as `module(x, edge_index, **kwargs)`; it must be deterministic (for example in eval mode).
        x: Node features, `[N, F]`.
        edge_index: The edges, `[2, E]`.
        seed: Seed of the permutations. (default: `0`)
        **kwargs: Further arguments of the module.

    Raises:
        AssertionError: If an output differs.

    Example:
        >>> import torch, gattn
        >>> from gattn.testing import assert_permutation_equivariant
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> assert_permutation_equivariant(gattn.nn.GATConv(4, 8), torch.randn(3, 4), edge_index)
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    nodes = torch.randperm(x.size(0), generator=generator)
    edges = torch.randperm(edge_index.size(1), generator=generator)
    place = torch.empty_like(nodes)
    place[nodes] = torch.arange(nodes.numel())
    out = module(x, edge_index, **kwargs)
    torch.testing.assert_close(module(x, edge_index[:, edges], **kwargs), out)
    torch.testing.assert_close(module(x[nodes], place[edge_index], **kwargs), out[nodes])


def assert_compiles_whole(
    module: Callable[..., Any], *inputs: Any, dynamic: bool | None = True, backend: str = "aot_eager", **kwargs: Any
) -> None:
    """Asserts that `torch.compile` makes one graph of a module, forward and backward, without a break.

    Results and the gradients of parameters are compared with those of the module as it is.

    Args:
        module: Called as `module(*inputs, **kwargs)`; it must be deterministic (for example in eval mode) and return
            a tensor, or several.
        *inputs: Its arguments.
        dynamic: See `torch.compile`. (default: `True`, sizes are open)
        backend: See `torch.compile`: `"inductor"` makes machine code as well. (default: `"aot_eager"`)
        **kwargs: Further arguments of the module.

    Raises:
        AssertionError: If there is a break (the message says where and why), or a result differs.

    Example:
        >>> import torch, gattn
        >>> from gattn.testing import assert_compiles_whole
        >>> conv, x = gattn.nn.GATConv(4, 8, edge_dim=2), torch.randn(3, 4)
        >>> assert_compiles_whole(conv, x, torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.randn(3, 2))
    """
    if breaks := graph_breaks(module, *inputs, **kwargs):
        raise AssertionError(f"{type(module).__name__} is compiled with {len(breaks)} breaks: {'; '.join(breaks)}.")
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend)
    leaves = [x for x in getattr(module, "parameters", list)() if x.requires_grad]
    outs = [_with_gradients(call(*inputs, **kwargs), leaves) for call in (module, compiled)]
    torch.testing.assert_close(outs[1], outs[0])


def _with_gradients(out: Any, leaves: list[Tensor]) -> list[Tensor]:
    """The floating-point tensors of a result, and what their sums give the leaves."""
    results = out if isinstance(out, (tuple, list)) else [out]
    outs = [x for x in results if isinstance(x, Tensor) and x.is_floating_point()]
    total = sum(x.sum() for x in outs if x.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, Tensor) and leaves else ()
    return [*(x.detach() for x in outs), *(x for x in grads if x is not None)]


def assert_alone_equals_in_batch(
    module: Callable[..., Any],
    graphs: Sequence[Data],
    call: Callable[[Any, Batch], Tensor] | None = None,
    *,
    tolerance: float | None = None,
) -> None:
    r"""Asserts that the output for a graph does not depend on the other graphs of its batch.

    Layers that pad graphs to a common size often fail this: padded nodes enter a sum, or the common size a formula.

    Each graph is run alone and in batches of PyG: of all graphs in the given order, in the reverse order, and with the
    smallest and the largest graph repeated at both ends. Differences may be due to rounding only. The tolerance is
    derived: it is the error of float32 for the same graphs alone, scaled to the precision of float64, in which batches
    are compared, and a few units in the last place of the largest output:

    .. math::
        \max |\mathrm{batch} - \mathrm{alone}| \le 16 \left(\frac{\epsilon_{64}}{\epsilon_{32}}
        \max |\mathrm{alone}_{32} - \mathrm{alone}| + \epsilon_{64} \max |\mathrm{alone}|\right)

    A `torch.nn.Module` is copied and put in evaluation mode; the original stays as it is. Parameters and features are
    first rounded to float32. Meanwhile, the default type of PyTorch is the one in which the module computes.

    Args:
        module: A module, or another function that computes in the type of its input.
        graphs: At least two graphs, among which one has a single node and one has more.
        call: How the module is called: `call(module, data)` returns its output for a `Batch`, which may hold a single
            graph: `[N, ...]`, `[B, ...]` or `[E, ...]`, graph by graph. (default: `None`,
            `module(data.x, data.edge_index, batch=data.batch)`, without `batch` if the module does not take it)
        tolerance: The largest difference allowed, relative to the largest output. If it is given, module and features
            are used in their own types and the module itself is run, in evaluation mode; its mode is restored
            afterwards. This is for modules that cannot be copied or converted. (default: `None`, derived)

    Raises:
        AssertionError: If an output differs, is not finite, or has another number of rows in a batch, or if two runs
            of the same graph differ.
        TypeError: If `graphs` are not PyG's `Data`, an output is not a tensor, or `tolerance` is not a number.
        ValueError: If the graphs do not have the sizes described above, or `tolerance` is negative or not finite.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Data
        >>> from gattn.testing import assert_alone_equals_in_batch, random_edge_index
        >>> graphs = [Data(torch.randn(n, 8), random_edge_index(n, num_edges=2 * n)) for n in (5, 1, 3)]
        >>> assert_alone_equals_in_batch(gattn.nn.GPSConv(8, gattn.nn.GATConv(8, 8)), graphs)
        >>> def centred(x, edge_index):  # by the mean over all graphs of the batch
        ...     return x - x.mean(0)
        >>> assert_alone_equals_in_batch(centred, graphs)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: graph ... depends on the other graphs of its batch: ...
    """
    if tolerance is not None:
        check_number("tolerance", tolerance, "finite and not negative")
    graphs = _checked_graphs(graphs)
    call = _call_with_batch if call is None else call
    if tolerance is not None:
        with _evaluating(module):
            alone = _alone(module, graphs, call)
            _compare(module, graphs, call, alone, tolerance * _largest(alone))
        return
    narrow, wide = (_converted(module, dtype) for dtype in (torch.float32, torch.float64))
    graphs32 = [_with_type(graph, torch.float32) for graph in graphs]
    graphs64 = [_with_type(graph, torch.float64) for graph in graphs32]
    with _evaluating(narrow, torch.float32):
        alone32 = _alone(narrow, graphs32, call)
    with _evaluating(wide, torch.float64):
        alone = _alone(wide, graphs64, call)
        error = max(_difference(a, b) for a, b in zip(alone32, alone, strict=True))
        eps32, eps64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
        _compare(wide, graphs64, call, alone, 16 * (eps64 / eps32 * error + eps64 * _largest(alone)))


def _call_with_batch(module: Callable[..., Any], data: Batch) -> Any:
    function = module.forward if isinstance(module, torch.nn.Module) else module
    takes_batch = "batch" in inspect.signature(function).parameters
    return module(data.x, data.edge_index, **({"batch": data.batch} if takes_batch else {}))


def _checked_graphs(graphs: Sequence[Data]) -> list[Data]:
    graphs = list(graphs)
    for graph in graphs:
        if not isinstance(graph, Data) or isinstance(graph, Batch):
            raise InputTypeError(
                f"graphs must be torch_geometric.data.Data, one per graph; got {type(graph).__name__}."
            )
    sizes = [graph.num_nodes for graph in graphs]
    if 1 not in sizes or len(set(sizes)) < 2:
        raise InputError(
            "graphs must include one with a single node and one with more, because padding shows only where sizes "
            f"differ; got graphs with {sizes} nodes."
        )
    return graphs


def _with_type(graph: Data, dtype: torch.dtype) -> Data:
    return copy.copy(graph).apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def _converted(module: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A copy of a module in another type, rounded to float32 first, so that both copies have the same parameters."""
    return copy.deepcopy(module).float().to(dtype) if isinstance(module, torch.nn.Module) else module


@contextmanager
def _evaluating(module: Callable[..., Any], dtype: torch.dtype | None = None) -> Iterator[None]:
    """Without gradients, in evaluation mode, which is undone for each submodule, and with another default type."""
    modes = [(part, part.training) for part in module.modules()] if isinstance(module, torch.nn.Module) else []
    default = torch.get_default_dtype()
    try:
        if isinstance(module, torch.nn.Module):
            module.eval()
        torch.set_default_dtype(default if dtype is None else dtype)  # modules make tensors, as SGFormer does
        with torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(default)
        for part, mode in modes:
            part.training = mode


def _alone(module: Callable[..., Any], graphs: list[Data], call: Callable[[Any, Batch], Tensor]) -> list[Tensor]:
    """The output for each graph alone."""
    alone = [_output(module, [graph], call) for graph in graphs]
    for number, (graph, out) in enumerate(zip(graphs, alone, strict=True)):
        if not bool(out.isfinite().all()):
            raise AssertionError(f"the output for {_name(number, graph)} alone is not finite.")
    return alone


def _output(module: Callable[..., Any], graphs: list[Data], call: Callable[[Any, Batch], Tensor]) -> Tensor:
    # Modules may write into their input, which is used again.
    out = call(module, Batch.from_data_list([graph.clone() for graph in graphs]))
    if not isinstance(out, Tensor):
        raise InputTypeError(
            f"the output must be a tensor, got {type(out).__name__}; let call(module, data) select or join tensors."
        )
    if out.dim() == 0:
        raise InputError("the output must have one row per node, graph or edge; got a tensor without dimensions.")
    return out


def _compare(
    module: Callable[..., Any],
    graphs: list[Data],
    call: Callable[[Any, Batch], Tensor],
    alone: list[Tensor],
    allowed: float,
) -> None:
    sizes = [graph.num_nodes for graph in graphs]
    small, large = sizes.index(1), sizes.index(max(sizes))
    order = list(range(len(graphs)))
    batches = {
        "in the given order": order,
        "in the reverse order": order[::-1],
        f"with graphs {small} and {large} repeated": [small, large, *order, large, small],
    }
    for number, graph in enumerate(graphs):
        if _difference(_output(module, [graph], call), alone[number]) > allowed:
            raise AssertionError(
                f"two runs for {_name(number, graph)} alone differ; in evaluation mode, the module must be "
                "deterministic."
            )
    worst = (0.0, "")
    for how, members in batches.items():
        out = _output(module, [graphs[number] for number in members], call)
        rows = [alone[number].size(0) for number in members]
        if out.shape[1:] != alone[0].shape[1:] or out.size(0) != sum(rows):
            raise AssertionError(
                f"the output for all graphs {how} has shape {list(out.shape)}; it must have the rows of the outputs "
                f"for each graph alone, whose shapes are {[list(alone[number].shape) for number in members]}."
            )
        for number, part in zip(members, torch.split(out, rows), strict=True):
            difference = _difference(part, alone[number])
            if difference > max(worst[0], allowed):
                size = alone[number].abs().max().item()
                message = (
                    f"{_name(number, graphs[number])} depends on the other graphs of its batch: with all graphs {how}, "
                    f"its output of shape {list(part.shape)} differs by up to {difference:.3g} from the one alone, "
                    f"whose largest element is {size:.3g}. Rounding explains {allowed:.2g}."
                )
                worst = difference, message
    if worst[1]:
        raise AssertionError(worst[1])


def _difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, infinity for NaN."""
    if actual.numel() == 0:
        return 0.0
    return (actual.double() - expected.double()).abs().nan_to_num(torch.inf, torch.inf).max().item()


def _largest(tensors: list[Tensor]) -> float:
    return max((x.abs().max().item() for x in tensors if x.numel()), default=0.0)


def _name(number: int, graph: Data) -> str:
    return f"graph {number} ({graph.num_nodes} node{'s' * (graph.num_nodes != 1)})"
