"""The graphs of a relational database, whose tokens are the cells of its tables.

Dimensions: S cells, L links, N cells of one column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gattn.errors import InputError, InputTypeError
from gattn.graphs.builders import checked_batch, runs
from gattn.graphs.complete import CompleteGraph
from gattn.graphs.edge_lists import INTEGER_DTYPES
from gattn.graphs.sparse import SparseGraph

__all__ = ["TableGraphs", "from_tables"]


class TableGraphs(NamedTuple):
    """Who attends to whom among the cells of tables, as `from_tables` returns it."""

    order: Tensor
    """`[S]`, the cells column by column: `x[order]` are the features in the order of `column`."""
    column: CompleteGraph
    """Packed: each cell attends to those of its column."""
    feature: SparseGraph
    """Each cell attends to those of its row, and of the rows to which foreign keys of its row point."""
    neighbor: SparseGraph
    """Each cell attends to those of the rows whose foreign keys point to its row."""
    full: CompleteGraph
    """Each cell attends to all cells of its context."""


def from_tables(row: Tensor, column: Tensor, links: Tensor, *, batch: Tensor | None = None) -> TableGraphs:
    r"""Joins the cells of tables by column, by row and parents, by children, and all with all.

    With the row :math:`r_i` and the column :math:`c_i` of a cell, and links :math:`r \to p` from a row to the row, of
    this or another table, to which one of its foreign keys points, the sources of cell i are

    .. math::
        \text{column: } c_j = c_i, \qquad
        \text{feature: } r_j = r_i \text{ or } r_i \to r_j, \qquad
        \text{neighbor: } r_j \to r_i, \qquad
        \text{full: any } j

    all within one context. These are the four attention masks of the `Relational Transformer
    <https://arxiv.org/abs/2510.06377>`_, without a matrix of all pairs: columns and contexts are blocks of complete
    graphs, and the two others lists of edges, target by target. `gattn.nn.RelationalTransformerLayer` takes them.

    Args:
        row: The row of each cell, `[S]`, numbered across all tables. A row may occur in several contexts.
        column: The column of each cell, `[S]`, numbered across all tables.
        links: The foreign keys, `[2, L]`, rows above the rows to which they point. Those of rows without cells in a
            context have no effect there, and repeated ones count once.
        batch: The context of each cell, `[S]`, in ascending order. (default: `None`, a single one)

    Returns:
        The graphs, and the order of cells that one of them needs.

    Raises:
        TypeError: If an argument is not a tensor of integers.
        ValueError: If shapes do not fit, or a number or the order of the batch is wrong.

    Example:
        Two customers (rows 0 and 1: a name) and an order of the second (row 2: a date and a price):

        >>> import torch, gattn
        >>> row, column = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 2])
        >>> graphs = gattn.graphs.from_tables(row, column, links=torch.tensor([[2], [1]]))
        >>> graphs.feature.edge_index
        tensor([[0, 1, 1, 2, 3, 1, 2, 3],
                [0, 1, 2, 2, 2, 3, 3, 3]])
        >>> graphs.neighbor.edge_index
        tensor([[2, 3],
                [1, 1]])
        >>> graphs.order, graphs.column
        (tensor([0, 1, 2, 3]), CompleteGraph(4, 4, 3 blocks))
    """
    for name, numbers in (("row", row), ("column", column), ("links", links)):
        if not isinstance(numbers, Tensor) or numbers.dtype not in INTEGER_DTYPES:
            kind = numbers.dtype if isinstance(numbers, Tensor) else type(numbers).__name__
            raise InputTypeError(f"{name} must be a tensor of integers; got {kind}.")
    _check_shapes(row, column, links)
    count, device = row.numel(), row.device
    context = checked_batch(batch, count, device, rows="cell")
    full = CompleteGraph(count) if batch is None else CompleteGraph.packed(batch=batch)

    of_column = _numbered(context, column.long())
    order = of_column.argsort(stable=True)
    blocks = CompleteGraph.packed(of_column.bincount())

    # Rows of each context are numbered anew, so that a number for two of them fits.
    numbers = torch.unique(torch.cat([row.long(), links.long().flatten()]), return_inverse=True)[1]
    number, (child, parent) = numbers[:count], numbers[count:].view(2, -1)
    size = max(numbers.numel(), 1)
    rows, of_row = torch.unique(context * size + number, return_inverse=True)
    child, by_child = child.sort(stable=True)
    first, end = (torch.searchsorted(child, rows % size, right=right) for right in (False, True))
    lower, place = runs(first, end - first)
    wanted = rows[lower] - rows[lower] % size + parent[by_child[place]]
    upper = torch.searchsorted(rows, wanted)
    is_there = rows[upper.clamp(max=rows.numel() - 1)] == wanted
    linked = torch.stack([lower[is_there], upper[is_there]])
    itself = torch.arange(rows.numel(), device=device).expand(2, -1)
    feature = _of_rows(of_row, torch.cat([linked, itself], 1))
    return TableGraphs(order, blocks, feature, _of_rows(of_row, linked.flip(0)), full)


def _check_shapes(row: Tensor, column: Tensor, links: Tensor) -> None:
    if row.dim() != 1 or column.shape != row.shape:
        raise InputError(
            f"row and column must have one number per cell, [S]; got {list(row.shape)} and {list(column.shape)}."
        )
    if links.dim() != 2 or links.size(0) != 2:
        raise InputError(f"links must be [2, L], rows above the rows to which they point; got {list(links.shape)}.")
    if len({str(x.device) for x in (row, column, links)}) > 1:
        raise InputError("row, column and links must be on one device.")
    for name, numbers in (("row", row), ("column", column), ("links", links)):
        if numbers.numel() and int(numbers.min()) < 0:
            raise InputError(f"{name} must hold numbers from 0; got {int(numbers.min())}.")


def _numbered(first: Tensor, second: Tensor) -> Tensor:
    """The number of each pair of numbers among all different ones, in their order."""
    second = torch.unique(second, return_inverse=True)[1]
    found: Tensor = torch.unique(first * max(second.numel(), 1) + second, return_inverse=True)[1]
    return found


def _of_rows(of_row: Tensor, pairs: Tensor) -> SparseGraph:
    """The graph in which all cells of a row attend to those of another, for pairs of rows, targets above sources."""
    target, source = torch.unique(pairs, dim=1)  # target by target
    size, cells, counts = of_row.numel(), of_row.argsort(stable=True), of_row.bincount()
    first, per_row = counts.cumsum(0) - counts, target.bincount(minlength=counts.numel())
    cell, pair = runs((per_row.cumsum(0) - per_row)[of_row], per_row[of_row])
    owner, place = runs(first[source[pair]], counts[source[pair]])
    return SparseGraph(torch.stack([cells[place], cell[owner]]), size, size)
