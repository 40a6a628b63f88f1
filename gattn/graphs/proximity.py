"""Graphs of what is close to each other in space or in time: nearest neighbours, balls, grids and earlier events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag, check_number, check_real
from gattn.graphs.base import checked_size
from gattn.graphs.builders import checked_batch, runs
from gattn.graphs.edge_lists import INTEGER_DTYPES
from gattn.graphs.sparse import SparseGraph

__all__ = ["checked_times", "earlier_than", "grid", "knn", "radius"]

_Array: TypeAlias = np.ndarray[Any, Any]

#: Distances that are computed at a time.
_AT_ONCE = 2**22
#: The number of neighbours within a distance that are looked for first, and then twice as many where there are more.
_AT_FIRST = 16
#: Squares of larger coordinates might overflow.
_LARGEST = 1e150


def knn(
    x: Tensor,
    k: int,
    batch: Tensor | None = None,
    *,
    y: Tensor | None = None,
    batch_y: Tensor | None = None,
    loop: bool = False,
) -> tuple[SparseGraph, Tensor]:
    r"""Joins every node to its k nearest neighbours, by Euclidean distance.

    .. math::
        \mathcal{N}(i) = \operatorname{arg\,min}^k_j \lVert x_j - y_i \rVert

    Edges go from neighbours to the node that looks for them, target by target, nearest first. Among neighbours at the
    same distance (in float64), those that come first in `x` are taken and listed first. A node whose graph has fewer
    other nodes gets all of them.

    It is the graph of `Point Transformer <https://arxiv.org/abs/2012.09164>`_ and of `DGCNN
    <https://arxiv.org/abs/1801.07829>`_. In contrast to `torch_geometric.nn.knn_graph`, it needs no compiled extension:
    neighbours are found on the CPU by a k-d tree of SciPy for each graph, which is fast for a few dimensions.

    Args:
        x: The positions of the nodes, `[N, D]` or `[N]`; with `y`, those of the sources, `[M, D]`.
        k: The number of neighbours, at least 1.
        batch: The graph of each row of `x`, `[N]`, in any order. (default: `None`, a single graph)
        y: The positions of the targets, `[N, D]`, if they are other nodes than the sources. (default: `None`)
        batch_y: The graph of each row of `y`, `[N]`. (default: `None`, a single graph)
        loop: Whether the first of its k neighbours is the node itself. (default: `False`)

    Shapes:
        - **distances:** `[E]`, in the dtype of `x`.

    Returns:
        The graph, and the length of each edge, through which gradients reach the positions.

    Raises:
        TypeError: If an argument is not of a type above.
        ValueError: If `k` is not positive, positions are not finite real numbers of the right shape, `batch` does not
            hold the graph of each node, only one of `batch` and `batch_y` is given together with `y`, or `batch_y` or
            `loop=True` does not fit.

    Example:
        >>> import torch, gattn
        >>> graph, distances = gattn.graphs.knn(torch.tensor([[0.0], [1.0], [3.0], [7.0]]), k=1)
        >>> graph.edge_index  # the nearest neighbour of each node, above the node
        tensor([[1, 0, 1, 2],
                [0, 1, 2, 3]])
        >>> distances
        tensor([1., 1., 2., 4.])
    """
    check_at_least(1, k=k)
    check_flag("loop", loop)

    def find(points: _Array, queries: _Array) -> tuple[_Array, _Array]:
        return _nearest(points, queries, int(k) - bool(loop), own=y is None)

    return _joined(x, batch, y, batch_y, loop, find)


def radius(
    x: Tensor,
    r: float,
    batch: Tensor | None = None,
    *,
    y: Tensor | None = None,
    batch_y: Tensor | None = None,
    loop: bool = False,
    max_num_neighbors: int | None = None,
) -> tuple[SparseGraph, Tensor]:
    r"""Joins every node to all nodes within a distance.

    .. math::
        \mathcal{N}(i) = \{ j : \lVert x_j - y_i \rVert \le r \}

    Edges are ordered as those of `knn`. In contrast to `torch_geometric.nn.radius_graph`, there is no limit to the
    number of neighbours unless it is given, and the nearest ones are then kept. Molecules and particles are joined in
    this way, for example in `SchNet <https://arxiv.org/abs/1706.08566>`_ and `PointNet++
    <https://arxiv.org/abs/1706.02413>`_.

    Args:
        x: The positions of the nodes, `[N, D]` or `[N]`; with `y`, those of the sources, `[M, D]`.
        r: The largest distance, at least 0. Distances are compared in float64.
        batch: The graph of each row of `x`, `[N]`, in any order. (default: `None`, a single graph)
        y: The positions of the targets, `[N, D]`, if they are other nodes than the sources. (default: `None`)
        batch_y: The graph of each row of `y`, `[N]`. (default: `None`, a single graph)
        loop: Whether every node is also joined to itself, which counts as a neighbour. (default: `False`)
        max_num_neighbors: The largest number of neighbours; the nearest ones are kept, and among those at the same
            distance the first ones in `x`. (default: `None`, no limit)

    Shapes:
        - **distances:** `[E]`, in the dtype of `x`.

    Returns:
        The graph, and the length of each edge, through which gradients reach the positions.

    Raises:
        TypeError: If an argument is not of a type above.
        ValueError: If a number is too small, positions are not finite real numbers of the right shape, `batch` does not
            hold the graph of each node, only one of `batch` and `batch_y` is given together with `y`, or `batch_y` or
            `loop=True` does not fit.

    Example:
        >>> import torch, gattn
        >>> graph, distances = gattn.graphs.radius(torch.tensor([[0.0], [1.0], [3.0], [7.0]]), r=2.0)
        >>> graph.edge_index
        tensor([[1, 0, 2, 1],
                [0, 1, 1, 2]])
        >>> distances
        tensor([1., 1., 2., 2.])
    """
    check_number("r", r, "finite and not negative")
    check_flag("loop", loop)
    if max_num_neighbors is not None:
        check_at_least(1, max_num_neighbors=max_num_neighbors)
    most = None if max_num_neighbors is None else int(max_num_neighbors) - bool(loop)

    def find(points: _Array, queries: _Array) -> tuple[_Array, _Array]:
        return _within(points, queries, float(r), most, own=y is None)

    return _joined(x, batch, y, batch_y, loop, find)


def _joined(
    x: Tensor,
    batch: Tensor | None,
    y: Tensor | None,
    batch_y: Tensor | None,
    loop: bool,
    find: Callable[[_Array, _Array], tuple[_Array, _Array]],
) -> tuple[SparseGraph, Tensor]:
    """The graph of what `find` returns for the points and queries of each graph, and the lengths of its edges.

    `find` returns targets in ascending order and their sources, nearest first and without the targets themselves.
    """
    x = _positions("x", x)
    batches = [checked_batch(batch, len(x), x.device, rows="row of x")]
    if y is None:
        if batch_y is not None:
            raise InputError("batch_y is for the positions of other targets, y: leave it out, or pass y.")
        positions = [x, x]
        batches *= 2
    else:
        if loop:
            raise InputError("loop=True is for nodes that are both sources and targets: leave it out, or leave y out.")
        if (batch is None) != (batch_y is None):
            raise InputError("batch and batch_y go together: pass the graph of each source and of each target.")
        positions = [x, _positions("y", y)]
        if positions[1].shape[1:] != x.shape[1:] or y.device != x.device:
            raise InputError(
                "x and y must have the same number of coordinates, on one device; got "
                f"{list(x.shape)} on {x.device} and {list(y.shape)} on {y.device}."
            )
        batches.append(checked_batch(batch_y, len(y), x.device, "batch_y", "row of y"))
    found = []
    sides = [_by_graph(*side) for side in zip(positions, batches, strict=True)]
    for graph in sides[0].keys() & sides[1].keys():
        (sources, points), (targets, queries) = sides[0][graph], sides[1][graph]
        target, source = find(points, queries)
        found.append(np.stack([sources[source], targets[target]]))
    edges = torch.from_numpy(np.concatenate([np.zeros((2, 0), dtype=np.int64), *found], 1)).to(x.device)
    if loop:  # a stable sort then puts the node itself in front of its neighbours
        edges = torch.cat([torch.arange(len(x), device=x.device).expand(2, -1), edges], 1)
    edges = edges[:, edges[1].argsort(stable=True)]
    ends = [x if x.is_floating_point() else x.double() for x in positions]
    distances = torch.linalg.vector_norm(ends[0][edges[0]] - ends[1][edges[1]], dim=-1)
    if not x.is_floating_point():
        distances = distances.to(torch.get_default_dtype())
    return SparseGraph(edges, len(positions[1]), len(x)), distances


def _positions(name: str, x: Any) -> Tensor:
    """Positions as `[N, D]` after all checks."""
    if not isinstance(x, Tensor):
        raise InputTypeError(f"{name} must be a tensor of positions, [N, D]; got {type(x).__name__}.")
    check_real(name, x)
    if x.dim() not in (1, 2) or (x.dim() == 2 and x.size(1) == 0):
        raise InputError(f"{name} must hold one position per row, [N, D]; got {list(x.shape)}.")
    if not bool((x.detach().double().abs() < _LARGEST).all()):
        raise InputError(
            f"{name} must hold finite positions below {_LARGEST:.0e}; it has NaN, infinity or larger ones."
        )
    return x.view(-1, 1) if x.dim() == 1 else x


def _by_graph(x: Tensor, batch: Tensor) -> dict[int, tuple[_Array, _Array]]:
    """The nodes and positions of each graph that has nodes, in the order of nodes."""
    numbers, positions = batch.cpu().numpy(), x.detach().double().cpu().numpy()
    order = numbers.argsort(kind="stable")
    graphs, first = np.unique(numbers[order], return_index=True)
    parts = np.split(order, first[1:])
    return {int(graph): (nodes, positions[nodes]) for graph, nodes in zip(graphs, parts, strict=False)}


def _nearest(points: _Array, queries: _Array, k: int, own: bool, r: float = np.inf) -> tuple[_Array, _Array]:
    """The queries and their k nearest points, or fewer within r, without the point of the same number."""
    k, rows, none = min(k, len(points) - own), np.arange(len(queries)), np.zeros(0, dtype=np.int64)
    if k <= 0:
        return none, none
    kept = _first_at_each_place(points, k + own)  # later ones are never among the nearest, and slow the tree down
    tree, numbers = cKDTree(points[kept]), np.append(kept, len(points))  # the last one for points that are too far
    count, found = (k if r == np.inf else min(k, _AT_FIRST)) + own + 1, [(none, none)]
    while rows.size:
        count = min(count, len(kept))
        unsettled = [none]
        for part in np.array_split(rows, -(-rows.size * count // _AT_ONCE)):
            distances, places = tree.query(queries[part], np.arange(1, count + 1), distance_upper_bound=_farther(r))
            distances[distances > r] = np.inf
            farthest, sources = distances[:, -1].copy(), numbers[places]
            if own:
                distances[sources == part[:, None]] = np.inf
            order = np.lexsort((sources, distances), axis=-1)[:, :k]
            near, chosen = np.take_along_axis(distances, order, 1), np.take_along_axis(sources, order, 1)
            # Others may be as far as the last one, unless there are none.
            is_settled = (count - own >= k) & (near[:, -1] < farthest) | (farthest == np.inf) | (count == len(kept))
            is_near = is_settled[:, None] & (near < np.inf)
            found.append((part[is_near.nonzero()[0]], chosen[is_near]))
            unsettled.append(part[~is_settled])
        rows = np.concatenate(unsettled)
        count *= 2
    target, source = (np.concatenate(ends) for ends in zip(*found, strict=True))
    order = target.argsort(kind="stable")
    return target[order], source[order]


def _first_at_each_place(points: _Array, count: int) -> _Array:
    """The first points at each place, at most this many, in ascending order."""
    order = np.lexsort(points.T)
    places = points[order]
    number = np.concatenate([[0], np.cumsum((places[1:] != places[:-1]).any(1))])
    return np.sort(order[np.arange(len(order)) - np.searchsorted(number, number) < count])


def _within(points: _Array, queries: _Array, r: float, most: int | None, own: bool) -> tuple[_Array, _Array]:
    """The queries and the points within r of them, nearest first, without the point of the same number."""
    if most is not None:
        return _nearest(points, queries, most, own, r)
    pairs = cKDTree(queries).sparse_distance_matrix(cKDTree(points), _farther(r), output_type="ndarray")
    pairs = pairs[(pairs["v"] <= r) & ~(own & (pairs["i"] == pairs["j"]))]
    pairs = pairs[np.lexsort((pairs["j"], pairs["v"], pairs["i"]))]
    return pairs["i"].astype(np.int64), pairs["j"].astype(np.int64)


def _farther(r: float) -> float:
    """A little more, because SciPy compares squares, whose rounding may lose pairs at exactly this distance."""
    return max(r * (1 + 1e-12), 1e-150)


def earlier_than(
    times: Tensor,
    k: int | None = None,
    *,
    groups: Tensor | None = None,
    query_times: Tensor | None = None,
    query_groups: Tensor | None = None,
) -> tuple[SparseGraph, Tensor]:
    r"""Joins events to the events before them, or queries to the events before them: all, or the k newest ones.

    With times :math:`t`, an event j is a source of the target i, which is an event or a query, if

    .. math::
        t_j < t_i \quad \text{and, with groups,} \quad g_j = g_i

    An event at the same time is not earlier. Edges are sorted by target, newest first. Events at the same time count as
    newer the later they come in `times`, which also decides which of them are among the k newest. Times and their
    differences are exact: integers stay integers, and floating-point numbers keep their precision.

    The neighbours of a node in a temporal graph, as `TGAT <https://arxiv.org/abs/2002.07962>`_ and `TGN
    <https://arxiv.org/abs/2006.10637>`_ see them, are the newest interactions of this node before a query: events are
    interactions, `groups` are the nodes at both of their ends, and a query asks for a node at a time. This takes
    O((M + N) log(M + N) + N k) steps.

    Args:
        times: The time of each event, `[M]`: integers or floating-point numbers.
        k: The largest number of sources of a target, at least 1. (default: `None`, all earlier events, whose number may
            be M² / 2)
        groups: The group of each event, `[M]`, such as the `batch` of PyG; integers, in any order. Or `[2, M]` if each
            event is in two groups, such as an `edge_index` of interactions; this needs queries.
            (default: `None`, one group)
        query_times: The time of each query, `[N]`, in the dtype of `times`. (default: `None`, the targets are the
            events)
        query_groups: The group of each query, `[N]`, together with `groups`. (default: `None`)

    Shapes:
        - **ages:** `[E]`, in the dtype of `times`; int64 for smaller integers.

    Returns:
        The graph, from events to events or to queries, and by how much each source is earlier than its target.

    Raises:
        TypeError: If an argument is not of a type above.
        ValueError: If `k` is not positive, shapes or dtypes do not fit, times are NaN, or groups are given for events
            or queries only.

    Example:
        >>> import torch, gattn
        >>> graph, ages = gattn.graphs.earlier_than(torch.tensor([10, 20, 20, 50]), k=2)
        >>> graph.edge_index
        tensor([[0, 0, 2, 1],
                [1, 2, 3, 3]])
        >>> ages
        tensor([10, 10, 30, 30])

        Which interactions of node 7 come before time 30, and which ones of node 5 before time 20?

        >>> interactions, times = torch.tensor([[7, 7, 5], [5, 6, 7]]), torch.tensor([10, 20, 30])
        >>> graph, ages = gattn.graphs.earlier_than(
        ...     times, groups=interactions, query_times=torch.tensor([30, 20]), query_groups=torch.tensor([7, 5])
        ... )
        >>> graph.edge_index
        tensor([[1, 0, 0],
                [0, 0, 1]])
        >>> ages
        tensor([10, 20, 10])
    """
    if k is not None:
        check_at_least(1, k=k)
    times = checked_times("times", times)
    queries = times if query_times is None else checked_times("query_times", query_times)
    if queries.dtype != times.dtype or queries.device != times.device:
        raise InputError(
            f"times and query_times must have one dtype, so that comparisons are exact, and one device; got "
            f"{times.dtype} on {times.device} and {queries.dtype} on {queries.device}."
        )
    num_events, num_queries = times.numel(), queries.numel()
    group, event, query_group = _groups(groups, query_groups, num_events, num_queries, times, query_times is not None)
    moments, rank = torch.unique(torch.cat([times, queries]).detach(), return_inverse=True)
    key = group * moments.numel() + rank[:num_events][event]  # as pairs of numbers are compared
    key, order = key.sort(stable=True)
    start = query_group * moments.numel()
    begin = torch.searchsorted(key, start)
    end = torch.searchsorted(key, start + rank[num_events:])
    length = end - begin if k is None else (end - begin).clamp(max=int(k))
    target, place = runs(end - length, length)
    place = (2 * end - length)[target] - 1 - place  # newest first
    source = event[order[place]]
    ages = queries[target] - times[source]
    return SparseGraph(torch.stack([source, target]), num_queries, num_events), ages


def checked_times(name: str, times: Any) -> Tensor:
    """Times after all checks; small integers become int64, so that differences fit."""
    if not isinstance(times, Tensor):
        raise InputTypeError(f"{name} must be a tensor; got {type(times).__name__}.")
    check_real(name, times)
    if times.dim() != 1:
        raise InputError(f"{name} must hold one time per row, one-dimensional; got {list(times.shape)}.")
    if not torch.compiler.is_compiling() and bool((times != times).any()):
        raise InputError(f"{name} must not be NaN, which is neither earlier nor later than other times.")
    return times if times.is_floating_point() else times.long()


def _groups(
    groups: Any, query_groups: Any, num_events: int, num_queries: int, times: Tensor, has_queries: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each membership's group and event, and the group of each query; groups are numbered from 0 without gaps."""
    event = torch.arange(num_events, device=times.device)
    if (query_groups is not None) != (has_queries and groups is not None):
        raise InputError(
            "groups, query_times and query_groups go together: with queries, pass the groups of both events and "
            "queries, or of neither; without queries, leave query_groups out."
        )
    if groups is None:
        return torch.zeros_like(event), event, event.new_zeros(num_queries)
    shapes = {"groups": [(num_events,), (2, num_events)] if has_queries else [(num_events,)]}
    shapes["query_groups"] = [(num_queries,)]
    for name, given in (("groups", groups), ("query_groups", query_groups)):
        if given is None:
            continue
        wanted = f"{name} must be integers {' or '.join(str(list(shape)) for shape in shapes[name])}"
        if not isinstance(given, Tensor):
            raise InputTypeError(f"{wanted}; got {type(given).__name__}.")
        if given.dtype not in INTEGER_DTYPES or given.shape not in shapes[name]:
            hint = " Events in two groups need queries." if not has_queries and given.dim() == 2 else ""
            raise InputError(f"{wanted}; got {list(given.shape)} of {given.dtype}.{hint}")
    groups = groups.to(times.device).long()
    query_groups = groups if query_groups is None else query_groups.to(times.device).long()
    member = groups.flatten()
    if groups.dim() == 2:  # an event both of whose groups are the same is in it once
        is_new = torch.cat([torch.ones_like(event, dtype=torch.bool), groups[0] != groups[1]])
        member, event = member[is_new], event.repeat(2)[is_new]
        # By event, so that later positions are newer among those at the same time.
        order = event.argsort(stable=True)
        member, event = member[order], event[order]
    number = torch.unique(torch.cat([member, query_groups]), return_inverse=True)[1]
    return number[: member.numel()], event, number[member.numel() :]


def grid(
    height: int, width: int, *, neighbors: int = 8, radius: int = 1, loop: bool = False, batch_size: int = 1
) -> tuple[SparseGraph, Tensor]:
    r"""Joins every pixel or patch of an image to those around it.

    With the offset :math:`\delta_{ij}` from the target i to the source j, in rows and columns,

    .. math::
        \mathcal{N}(i) = \{ j : 0 < \lVert \delta_{ij} \rVert \le \text{radius} \}

    where the norm is the larger of both numbers for 8 neighbours (a square window) and their sum for 4 (a diamond).
    Windows are cut off at the border of the image.

    It is the graph of `Stand-Alone Self-Attention in Vision Models <https://arxiv.org/abs/1906.05909>`_, with
    `loop=True` and a bias or an edge term looked up by offset, as in the example.

    Args:
        height: The number of rows.
        width: The number of columns.
        neighbors: 8 or 4, the number of neighbours within a radius of 1. (default: `8`)
        radius: The radius of the window, at least 1. (default: `1`)
        loop: Whether every pixel is also joined to itself. (default: `False`)
        batch_size: The number of images, whose pixels lie end to end. (default: `1`)

    Shapes:
        - **offsets:** `[E, 2]`, int64.

    Returns:
        The graph, whose nodes are the pixels row by row, and the row and column of each edge's source minus those of
        its target.

    Raises:
        TypeError: If a number is not an integer, or `loop` is neither true nor false.
        ValueError: If a number is negative, `radius` is not positive, or `neighbors` is neither 4 nor 8.

    Example:
        >>> import torch, gattn
        >>> graph, offsets = gattn.graphs.grid(2, 2, neighbors=4)
        >>> graph.edge_index
        tensor([[1, 2, 0, 3, 0, 3, 1, 2],
                [0, 0, 1, 1, 2, 2, 3, 3]])
        >>> offsets[:2]  # to the right of pixel 0, and below it
        tensor([[0, 1],
                [1, 0]])
        >>> row, column = (offsets + 1).t()  # each from 0 to 2
        >>> table, x = torch.randn(3, 3, 2), torch.randn(4, 2, 8)  # 2 heads, 8 channels
        >>> gattn.attend(x, x, x, graph, bias=table[row, column]).shape
        torch.Size([4, 2, 8])
    """
    height, width = checked_size("height", height), checked_size("width", width)
    batch_size = checked_size("batch_size", batch_size)
    check_at_least(1, radius=radius)
    check_flag("loop", loop)
    if isinstance(neighbors, bool) or neighbors not in (4, 8):
        raise InputError(f"neighbors must be 4 or 8; got {neighbors!r}.")
    side = torch.arange(-radius, radius + 1)
    offsets = torch.cartesian_prod(side, side)
    sizes = offsets.abs().amax(1) if neighbors == 8 else offsets.abs().sum(1)
    offsets = offsets[(sizes <= radius) & ((sizes > 0) | bool(loop))]
    pixels = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    places = pixels.unsqueeze(1) + offsets
    is_inside = ((places >= 0) & (places < torch.tensor([height, width]))).all(-1)
    target, which = is_inside.nonzero().unbind(1)
    row, column = places[is_inside].unbind(1)
    edges = torch.stack([row * width + column, target])
    first = torch.arange(batch_size).repeat_interleave(target.numel()) * (height * width)
    total = batch_size * height * width
    return SparseGraph(edges.repeat(1, batch_size) + first, total, total), offsets[which].repeat(batch_size, 1)
