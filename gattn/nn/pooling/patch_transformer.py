"""Transformers on patches of a set's elements.

Dimensions: B sets, N elements, F channels, P patches of one set, C hidden channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.encoding import PositionalEncoding
from torch_geometric.utils import scatter

from gattn.errors import InputError, check_at_least
from gattn.graphs import CompleteGraph
from gattn.nn.pooling.set_transformer import MultiheadAttentionBlock
from gattn.nn.pooling.sets import counts_of
from gattn.nn.shared.declared import Declared

__all__ = ["PatchTransformerAggregation"]

_REDUCTIONS = ("sum", "mean", "min", "max", "var", "std")


class PatchTransformerAggregation(Declared, Aggregation):
    r"""Attention among patches of consecutive elements of a set.

    The aggregation of `Simplifying Temporal Heterogeneous Network for Continuous-Time Link Prediction
    <https://dl.acm.org/doi/10.1145/3583780.3615059>`_: each `patch_size` consecutive elements of a set become one
    vector, whose place in the set is added, and the :math:`P` vectors of a set attend to each other:

    .. math::
        z_p = W_2 \big\Vert_{j \in p} (W_1 x_j + b_1) + b_2 + \mathrm{PE}(p), \qquad
        \mathrm{out} = W_3\, \mathrm{aggr}_p\, \mathrm{MAB}(z, z)_p + b_3

    This is a drop-in replacement for `torch_geometric.nn.PatchTransformerAggregation`: arguments, parameter names and,
    for one set, results are the same. For several sets, PyG's layer gives each as many patches as the largest one has,
    and those that are empty attend, are attended to and are averaged. Here, a set has the patches that it would have
    alone, so its result does not depend on other sets. As in PyG, a set of n elements has
    :math:`P = \lfloor (n + 1) / \mathrm{patch\_size} \rfloor` patches, the last elements may be left out, and a place
    without an element is filled with zeros. (A set for which this gives no patch has one here; PyG gives NaN.)

    Args:
        in_channels: The number of channels of the elements, F.
        out_channels: The number of channels of the output.
        patch_size: The number of elements of a patch.
        hidden_channels: The number of channels of the patches, C.
        num_transformer_blocks: The number of attention blocks. (default: `1`)
        heads: The number of attention heads. (default: `1`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        aggr: How patches are combined, or a list of ways whose results are laid side by side: `"sum"`, `"mean"`,
            `"min"`, `"max"`, `"var"`, `"std"`. The variance of a single patch is zero here, and NaN in PyG.
            (default: `"mean"`)
        device: Where the parameters are. (default: PyTorch's default device)

    Shapes:
        - **input:** elements `[N, F]` and the set of each, `[N]`.
        - **output:** `[B, out_channels]`. An empty set gives what one patch of zeros gives.

    Raises:
        ValueError: If an option is out of range, or `aggr` is unknown.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.PatchTransformerAggregation(16, 8, patch_size=2, hidden_channels=32, heads=4)
        >>> pool(torch.randn(7, 16), torch.tensor([0, 0, 0, 0, 0, 1, 1])).shape
        torch.Size([2, 8])
    """

    _shown = "in_channels out_channels patch_size="

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        patch_size: int,
        hidden_channels: int,
        num_transformer_blocks: int = 1,
        heads: int = 1,
        dropout: float = 0.0,
        aggr: str | list[str] = "mean",
        device: torch.device | str | None = None,
    ):
        super().__init__()
        check_at_least(1, in_channels=in_channels, out_channels=out_channels, patch_size=patch_size)
        check_at_least(0, num_transformer_blocks=num_transformer_blocks)
        self.in_channels, self.out_channels, self.patch_size = in_channels, out_channels, patch_size
        self.aggrs = [aggr] if isinstance(aggr, str) else list(aggr)
        if not self.aggrs or not set(self.aggrs) <= set(_REDUCTIONS):
            raise InputError(f"aggr must be some of {', '.join(map(repr, _REDUCTIONS))}; got {aggr!r}.")
        self.lin = Linear(in_channels, hidden_channels, device=device)
        self.pad_projector = Linear(patch_size * hidden_channels, hidden_channels, device=device)
        self.pe = PositionalEncoding(hidden_channels, device=device)
        self.blocks = ModuleList(
            MultiheadAttentionBlock(hidden_channels, heads, True, dropout, device)
            for _ in range(num_transformer_blocks)
        )
        self.fc = Linear(hidden_channels * len(self.aggrs), out_channels, device=device)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        max_num_elements: int | None = None,
    ) -> Tensor:
        """Aggregates the elements of each set.

        Args:
            x: The elements, `[N, F]`.
            index: The set of each element, `[N]`; the elements of a set are in their order. (default: `None`, one set)
            ptr: The first element of each set and the number of elements, `[B + 1]`. It is not read if there is an
                `index`, as PyG passes both. (default: `None`)
            dim_size: The number of sets, B. (default: `None`, the number in `index`)
            dim: The dimension of the elements. (default: `-2`)
            max_num_elements: The number of elements of a set after which others are left out. (default: `None`, all)

        Returns:
            The sets, `[B, out_channels]`.

        Raises:
            ValueError: If shapes do not fit each other, or `dim_size` is too small.
            IndexError: If an index is negative.
        """
        self.assert_two_dimensional_input(x, dim)
        x = x.movedim(dim, -2)
        index, counts = counts_of(x, index, ptr, dim_size)
        if bool((index.diff() < 0).any()):
            order = index.argsort(stable=True)
            x, index = x.index_select(0, order), index.index_select(0, order)
        patches = (counts + 1) // self.patch_size
        if max_num_elements is not None:
            patches = patches.clamp(max=max_num_elements // self.patch_size)
        patches = patches.clamp(min=1)
        first, start = patches.cumsum(0) - patches, counts.cumsum(0) - counts

        place = torch.arange(len(x), device=x.device) - start[index]
        is_kept = place < patches[index] * self.patch_size
        at = (first[index] * self.patch_size + place)[is_kept]
        num_patches, h = int(patches.sum()), self.lin(x)
        padded = h.new_zeros(num_patches * self.patch_size, h.size(-1)).index_copy(0, at, h[is_kept])
        z = self.pad_projector(padded.view(num_patches, self.patch_size * h.size(-1)))
        of = torch.arange(len(counts), device=x.device).repeat_interleave(patches)
        z = z + self.pe(torch.arange(num_patches, device=x.device) - first[of])
        graph = CompleteGraph.packed(patches.tolist())
        for block in self.blocks:
            z = block(z, z, graph=graph)
        out: Tensor = self.fc(torch.cat([_reduced(z, of, patches, aggr) for aggr in self.aggrs], -1))
        return out


def _reduced(z: Tensor, of: Tensor, patches: Tensor, aggr: str) -> Tensor:
    """One vector for each set, from those of its patches `[P, C]`."""
    if aggr not in ("var", "std"):
        return scatter(z, of, 0, len(patches), aggr)  # type: ignore[no-any-return]
    centred = z - scatter(z, of, 0, len(patches), "mean").index_select(0, of)
    squares: Tensor = scatter(centred.square(), of, 0, len(patches), "sum")
    variance = squares / (patches - 1).clamp(min=1).unsqueeze(1)  # unbiased, as PyTorch's
    if aggr == "var":
        return variance
    is_one = (patches == 1).unsqueeze(1)  # where the root of zero would have no gradient
    return variance.masked_fill(is_one, 1.0).sqrt().masked_fill(is_one, 0.0)
