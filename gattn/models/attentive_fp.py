"""Attentive FP: a network for molecules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import GRUCell, Linear, Module, ModuleList
from torch_geometric.nn.pool import global_add_pool

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs import GraphLike, SparseGraph, as_graph
from gattn.nn.graph.gat_conv import GATConv
from gattn.nn.graph.gate_conv import GATEConv
from gattn.nn.shared.dropout import dropout

__all__ = ["AttentiveFP"]


class AttentiveFP(Module):
    r"""The network of `Attentive FP <https://pubs.acs.org/doi/10.1021/acs.jmedchem.9b00959>`_.

    Atoms attend to their neighbours, first with the bonds between them (`GATEConv`), then without (`GATConv`), and a
    GRU updates an atom's state :math:`x_i` with the result. Then each molecule attends to its atoms several times,
    starting from their sum:

    .. math::
        x_i \leftarrow \mathrm{ReLU}\Big(\mathrm{GRU}\Big(\mathrm{ELU}\Big(b + \sum_{j \in \mathcal{N}(i)}
        \alpha_{ij} W x_j\Big), \, x_i\Big)\Big), \qquad
        m \leftarrow \mathrm{ReLU}\Big(\mathrm{GRU}\Big(\mathrm{ELU}\Big(b + \sum_{i \in m}
        \alpha_{mi} W x_i\Big), \, m\Big)\Big)

    A drop-in replacement for `torch_geometric.nn.models.AttentiveFP`, with the same arguments, parameter names and
    results. It also supports the graph in every form that the layers take, `batch_size`, and float32 accumulation in
    half precision.

    Differences from the authors' program: states go through a ReLU after each GRU, unless `keep_states` says
    otherwise; and its first layer projects an atom's neighbours with their bonds, has a bias in each score, and no bias
    after the sum.

    Args:
        in_channels: Channels of the input.
        hidden_channels: Channels of the states of atoms and molecules.
        out_channels: Channels of the output.
        edge_dim: Channels of the edge features.
        num_layers: Number of layers on atoms, including the one with bonds.
        num_timesteps: How many times a molecule attends to its atoms.
        dropout: Probability that a feature or an attention weight is dropped, in training. (default: `0.0`)
        keep_states: Whether states are kept before their ReLU, which then only attention sees, while GRUs and the last
            layer go on from what is negative, too. (default: `False`)

    Shapes:
        - **input:** features `[N, F_in]`, edge indices `[2, E]`, edge features `[E, D]`, the molecule of each atom
          `[N]`.
        - **output:** `[B, F_out]`, one row per molecule.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.AttentiveFP(9, 32, 1, edge_dim=3, num_layers=2, num_timesteps=2)
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])  # two molecules of two atoms each
        >>> model(torch.randn(4, 9), edge_index, torch.randn(4, 3), torch.tensor([0, 0, 1, 1])).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        edge_dim: int,
        num_layers: int,
        num_timesteps: int,
        dropout: float = 0.0,
        keep_states: bool = False,
    ):
        super().__init__()
        check_flag("keep_states", keep_states)
        self.keep_states = keep_states
        check_at_least(1, num_layers=num_layers)
        check_at_least(0, num_timesteps=num_timesteps)
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.out_channels = out_channels
        self.edge_dim = edge_dim
        self.num_layers = num_layers
        self.num_timesteps = num_timesteps
        self.dropout = dropout

        def gat() -> GATConv:
            return GATConv(hidden_channels, hidden_channels, dropout=dropout, add_self_loops=False, negative_slope=0.01)

        self.lin1 = Linear(in_channels, hidden_channels)
        self.gate_conv = GATEConv(hidden_channels, hidden_channels, edge_dim, dropout)
        self.gru = GRUCell(hidden_channels, hidden_channels)
        self.atom_convs = ModuleList()
        self.atom_grus = ModuleList()
        for _ in range(num_layers - 1):
            self.atom_convs.append(gat())
            self.atom_grus.append(GRUCell(hidden_channels, hidden_channels))
        self.mol_conv = gat()
        self.mol_conv.explain = False  # an explainer's mask has one entry per bond, none per atom of a molecule
        self.mol_gru = GRUCell(hidden_channels, hidden_channels)
        self.lin2 = Linear(hidden_channels, out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as PyG does."""
        rounds = [module for pair in zip(self.atom_convs, self.atom_grus, strict=True) for module in pair]
        modules: list[Any] = [self.lin1, self.gate_conv, self.gru, *rounds, self.mol_conv, self.mol_gru, self.lin2]
        for module in modules:
            module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: GraphLike,
        edge_attr: Tensor | None,
        batch: Tensor,
        batch_size: int | None = None,
    ) -> Tensor:
        """Reads molecules.

        Args:
            x: Features of the atoms, `[N, F_in]`.
            edge_index: The bonds, in any form that `gattn.attend` takes.
            edge_attr: Features of the bonds, `[E, D]`; `None` uses those of a sparse adjacency.
            batch: The molecule of each atom, `[N]`.
            batch_size: Number of molecules, B, which code that is compiled as a whole has to know. (default: `None`,
                one more than the largest number in `batch`)

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index is out of range (in compiled code, when the kernels run).
        """
        self._check(x, batch)
        graph = as_graph(edge_index)
        x = F.leaky_relu(self.lin1(x))
        x, state = self._step(self.gru, self.gate_conv(x, graph, edge_attr), x)
        for conv, gru in zip(self.atom_convs, self.atom_grus, strict=True):
            x, state = self._step(gru, conv(x, graph), state)

        if batch_size is None:
            batch_size = int(batch.max()) + 1 if batch.numel() else 0
        atoms = torch.arange(batch.size(0), device=batch.device)
        members = SparseGraph(torch.stack([atoms, batch.long()]), batch_size, batch.size(0))
        members.edges()  # checks the indices, which the sum does not
        state = global_add_pool(x, batch.long(), batch_size)
        out = state.relu()
        state = state if self.keep_states else out
        for _ in range(self.num_timesteps):
            out, state = self._step(self.mol_gru, self.mol_conv((x, out), members), state)
        out = self.lin2(self._drop(state))
        assert isinstance(out, Tensor)
        return out

    def _step(self, gru: Module, attended: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The new state after its ReLU, and what the next step starts from."""
        state = gru(self._drop(F.elu(attended)), state)
        out = state.relu()
        return out, state if self.keep_states else out

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)

    def _check(self, x: Any, batch: Any) -> None:
        """Checks what no layer checks."""
        for name, tensor in (("x", x), ("batch", batch)):
            if not isinstance(tensor, Tensor):
                raise InputTypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
        if x.dim() != 2 or x.size(-1) != self.in_channels:
            raise InputError(f"x must have shape [N, {self.in_channels}]; got {list(x.shape)}.")
        if batch.shape != x.shape[:1] or batch.is_floating_point():
            raise InputError(
                f"batch must hold the molecule of each atom, integers [{x.size(0)}]; got {list(batch.shape)} of "
                f"type {batch.dtype}."
            )

    def __repr__(self) -> str:
        names = ("in_channels", "hidden_channels", "out_channels", "edge_dim", "num_layers", "num_timesteps")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in names)})"
