"""Checkpoints of authors' programs as state dicts of gattn's layers and networks: names, orders of heads, and shapes.

Each function takes the state dict of one repository's module and returns one for `load_state_dict` of the layer that it
names. Modules inside others are found by a prefix, which `part` takes off. Tensors are copied only where their layout
differs. A name that the repository's module does not have raises, so nothing is left out in silence.

Example:
    >>> import torch, gattn
    >>> theirs = {"fc_q.weight": torch.randn(8, 4), "fc_q.bias": torch.randn(8), "fc_k.weight": torch.randn(8, 6),
    ...           "fc_k.bias": torch.randn(8), "fc_v.weight": torch.randn(8, 6), "fc_v.bias": torch.randn(8),
    ...           "fc_o.weight": torch.randn(8, 8), "fc_o.bias": torch.randn(8)}  # MAB(4, 6, 8, num_heads=2)
    >>> block = gattn.nn.MultiheadAttentionBlock(8, 2, layer_norm=False, projected=True, dim_q=4, dim_k=6)
    >>> block.load_state_dict(gattn.convert.set_transformer(theirs))
    <All keys matched successfully>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gattn.errors import InputError

__all__ = [
    "egt",
    "exphormer",
    "gated_gcn",
    "gatv2",
    "gps",
    "graphormer",
    "grit",
    "hgt",
    "lpformer",
    "part",
    "polynormer",
    "set_transformer",
    "sgformer",
    "supergat",
    "tgat",
    "tgn",
]

State = Mapping[str, Tensor]
#: A pattern of names, what they become (`None`: nothing; several: copies or pieces), and what tensors become.
_Rule = tuple[str, str | Sequence[str] | None, Callable[[Tensor], Tensor | Sequence[Tensor]]]


def part(state: State, prefix: str) -> dict[str, Tensor]:
    """What a state dict has below a prefix, without it.

    Args:
        state: The state dict of a whole network.
        prefix: The name of the module in it, such as `"layers.0"`.

    Returns:
        The state dict of that module.

    Raises:
        ValueError: If there is no such module.

    Example:
        >>> import torch, gattn
        >>> state = {"layers.0.A.weight": torch.ones(1), "layers.1.A.weight": torch.ones(1)}
        >>> list(gattn.convert.part(state, "layers.1"))
        ['A.weight']
    """
    start = prefix.removesuffix(".") + "."
    found = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
    if not found:
        raise InputError(
            f"there is nothing below {prefix!r}; names begin with {sorted({x.split('.')[0] for x in state})}."
        )
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _rule(
    pattern: str, to: str | Sequence[str] | None, change: Callable[..., Tensor | Sequence[Tensor]] = _same
) -> _Rule:
    return pattern, to, change


def _converted(state: State, rules: Sequence[_Rule]) -> dict[str, Tensor]:
    """Each name by the first rule that it fits."""
    out: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        name = name.removeprefix("module.")  # of DataParallel
        for pattern, to, change in rules:
            match = re.fullmatch(pattern, name)
            if match is None:
                continue
            if to is not None:
                names, made = [to] if isinstance(to, str) else to, change(tensor)
                tensors = [made] * len(names) if isinstance(made, Tensor) else made
                out |= {match.expand(place): piece for place, piece in zip(names, tensors, strict=True)}
            break
        else:
            unknown.append(name)
    if unknown:
        raise InputError(f"these are no names of that repository's module: {', '.join(unknown)}.")
    return out


def gatv2(state: State) -> dict[str, Tensor]:
    """For `gattn.nn.GATv2Conv(residual=False)`, from DGL's and the authors' `GATv2Conv`.

    `How Attentive are Graph Attention Networks? <https://arxiv.org/abs/2105.14491>`_; a checkpoint of PyG's layer needs
    no conversion.

    Args:
        state: The state dict of the layer.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    rules = [_rule(r"fc_src\.(.*)", r"lin_l.\1"), _rule(r"fc_dst\.(.*)", r"lin_r.\1"), _rule("attn", "att")]
    return _converted(state, [*rules, _rule("(bias)", r"\1")])


def supergat(state: State) -> dict[str, Tensor]:
    """For `gattn.nn.SuperGATConv`, from the authors' `SuperGAT`.

    `How to Find Your Friendly Neighborhood <https://openreview.net/forum?id=Wi5KUNlqWty>`_, with the attention types
    `"prob_mask_only"` (MX) and `"scaled_dot_product"` (SD).

    Args:
        state: The state dict of the layer.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    ends = _rule("att_mh_1", ("att_r", "att_l"), lambda x: x.chunk(2, -1))  # the target comes first
    return _converted(
        state, [_rule("weight", "lin.weight", lambda x: x.t().contiguous()), ends, _rule("(bias)", r"\1")]
    )


_GATED_GCN = [
    _rule(r"([ABC]\..*)", r"\1"),
    _rule(r"D\.(.*)", r"E.\1"),  # D is that of the target there
    _rule(r"E\.(.*)", r"D.\1"),
    _rule(r"bn_node_x\.(.*)", r"bn_node.\1"),
    _rule(r"bn_edge_e\.(.*)", r"bn_edge.\1"),
]


def gated_gcn(state: State) -> dict[str, Tensor]:
    """For `gattn.nn.GatedGCNConv(drop_residual=False)`, from GraphGPS's `GatedGCNLayer`.

    Args:
        state: The state dict of the layer.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    return _converted(state, _GATED_GCN)


def gps(state: State) -> dict[str, Tensor]:
    """For `gattn.nn.GPSConv`, from GraphGPS's `GPSLayer`.

    `Recipe for a General, Powerful, Scalable Graph Transformer <https://arxiv.org/abs/2205.12454>`_, around
    `GatedGCNConv(drop_residual=False)` or a layer of PyG. Its Performer is `attn_type="favor"`, and its `layer_norm` is
    `norm="graph_norm"`.

    Args:
        state: The state dict of the layer.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    is_gated = any(name.endswith("local_model.bn_node_x.weight") for name in state)
    inner = _GATED_GCN if is_gated else [_rule("(.*)", r"\1")]
    local = [_rule(rf"local_model\.{pattern}", f"conv.{to}", change) for pattern, to, change in inner]
    module = "module." if any(name.endswith("norm2.running_mean") for name in state) else ""
    norms = {"norm1_local": "norm1", "norm1_attn": "norm2", "norm2": "norm3"}
    return _converted(
        state,
        [
            *local,
            *(_rule(rf"{name}\.(.*)", rf"{to}.{module}\1") for name, to in norms.items()),
            _rule(r"self_attn\.to_([qkv])\.(.*)", r"attn.\1.\2"),
            _rule(r"self_attn\.to_out\.(.*)", r"attn.attn_out.\1"),
            _rule(r"self_attn\.fast_attention\.projection_matrix", "attn.fast_attn.projection"),
            _rule(r"self_attn\.(.*)", r"attn.\1"),
            _rule(r"ff_linear1\.(.*)", r"mlp.0.\1"),
            _rule(r"ff_linear2\.(.*)", r"mlp.3.\1"),
        ],
    )


def exphormer(state: State) -> dict[str, Tensor]:
    """For `gattn.nn.ExphormerLayer`, from the authors' `ExphormerFullLayer`.

    `Exphormer: Sparse Transformers for Graphs <https://arxiv.org/abs/2303.06147>`_.

    Args:
        state: The state dict of the layer.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    lins = {"Q": "query", "K": "key", "V": "value", "E": "edge"}
    return _converted(
        state,
        [
            *(_rule(rf"attention\.{name}\.(.*)", rf"attention.lin_{to}.\1") for name, to in lins.items()),
            _rule(r"O_h\..*", None),  # which is not used
            _rule(r"((?:layer|batch)_norm[12]_h\..*|FFN_h_layer[12]\..*)", r"\1"),
        ],
    )


def grit(state: State) -> dict[str, Tensor]:
    """For `gattn.nn.GRITLayer`, from the authors' `GritTransformerLayer`.

    `Graph Inductive Biases in Transformers without Message Passing <https://arxiv.org/abs/2305.17589>`_.

    Args:
        state: The state dict of the layer.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    heads = next((x.size(1) for name, x in state.items() if name.endswith("attention.Aw")), 1)

    def halves(x: Tensor) -> list[Tensor]:
        return [half.flatten(0, 1) for half in x.unflatten(0, (heads, 2, -1)).unbind(1)]

    lins = {"Q": "query", "K": "key", "V": "value"}
    of_pairs = (r"attention.lin_edge_weight.\1", r"attention.lin_edge_bias.\1")
    return _converted(
        state,
        [
            *(_rule(rf"attention\.{name}\.(.*)", rf"attention.lin_{to}.\1") for name, to in lins.items()),
            _rule(r"attention\.E\.(weight|bias)", of_pairs, halves),
            _rule(r"attention\.Aw", "attention.att", lambda x: x.squeeze(-1).t().contiguous()),
            _rule(r"attention\.VeRow", "attention.edge_value", lambda x: x.transpose(0, 1).contiguous()),
            _rule("deg_coef", "attention.degree_scale", lambda x: x.squeeze(0).t().contiguous()),
            _rule(r"(O_[he]\..*|(?:layer|batch)_norm[12]_[he]\..*|FFN_h_layer[12]\..*|alpha[12]_[he])", r"\1"),
        ],
    )


def egt(state: State) -> dict[str, Tensor]:
    """For `gattn.nn.EGTBlock`, from the authors' `EGT_Layer`.

    `Global Self-Attention as a Replacement for Graph Convolution <https://arxiv.org/abs/2108.03348>`_.

    Args:
        state: The state dict of the layer.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    heads = next((x.size(0) for name, x in state.items() if name.endswith("lin_E.weight")), 1)

    def by_head(x: Tensor) -> Tensor:  # heads are the last of its dimensions there
        return x.unflatten(0, (-1, heads)).transpose(0, 1).flatten(0, 1)

    projections = [rf"attention.lin_{name}.\1" for name in ("query", "key", "value")]
    return _converted(
        state,
        [
            _rule(r"(mha_ln_[he]\..*)", r"\1"),
            _rule(r"lin_QKV\.(.*)", projections, lambda x: [by_head(rows) for rows in x.chunk(3)]),
            _rule(r"lin_O_h\.weight", "attention.lin_out.weight", lambda x: by_head(x.t()).t().contiguous()),
            _rule(r"lin_O_h\.bias", "attention.lin_out.bias"),
            _rule(r"lin_E\.(.*)", r"attention.lin_edge.\1"),
            _rule(r"lin_G\.(.*)", r"attention.lin_gate.\1"),
            _rule(r"lin_O_e\.(.*)", r"attention.lin_edge_out.\1"),
            *(
                _rule(rf"{name}\.(.*)", rf"{kind}_ffn.{place}.\1")
                for kind, letter in (("node", "h"), ("edge", "e"))
                for name, place in ((f"ffn_ln_{letter}", 0), (f"lin_W_{letter}_1", 1), (f"lin_W_{letter}_2", 3))
            ),
        ],
    )


def lpformer(state: State, score: State | None = None) -> dict[str, Tensor]:
    """For `gattn.models.LPFormer(gnn_norm="node")`, from the authors' `LinkTransformer` and `mlp_score`.

    `LPFormer: An Adaptive Graph Transformer for Link Prediction <https://arxiv.org/abs/2310.11009>`_.

    Args:
        state: The state dict of the network.
        score: That of the scoring function, which is a module of its own there. (default: `None`, it is left out)

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    gnn = r"node_encoder\.gnn_encoder\."
    found = _converted(
        state,
        [
            _rule(gnn + r"convs\.(.*)", r"gnn.convs.\1"),
            _rule(gnn + r"lns\.(.*)", r"gnn.norms.\1"),
            _rule(r"node_encoder\.feat_transform\..*", None),  # which is not used
            _rule(r"att_layers\.(\d+)\.att\.(.*)", r"att_layers.\1.\2"),
            _rule(r"((?:gnn_norm|att_layers|elementwise_lin|ppr_encoder_\w+|pairwise_lin)\..*)", r"\1"),
        ],
    )
    return found | _converted(score or {}, [_rule(r"lins\.(.*)", r"score_func.linears.\1")])


def _temporal(state: State, frequency: str, phase: str, rules: Callable[[int, int], list[_Rule]]) -> dict[str, Tensor]:
    """A layer of TGN or TGAT with the encoding of times: rules by the numbers of channels of nodes and of times."""
    times = next((x.numel() for name, x in state.items() if name.endswith(frequency)), 0)
    channels = next((x.size(0) for name, x in state.items() if name.endswith("merger.fc1.weight")), 0)
    return _converted(
        state,
        [
            _rule(rf"(?:time_encoder\.)?{frequency}", "frequency", Tensor.flatten),
            _rule(rf"(?:time_encoder\.)?{phase}", "phase"),
            _rule(r"merger\.fc1\.(.*)", r"lin_hidden.\1"),
            _rule(r"merger\.fc2\.(.*)", r"lin_out.\1"),
            *rules(channels, times),
        ],
    )


def _key_rules(names: dict[str, str], channels: int) -> list[_Rule]:
    """Projections of neighbours and of their edges, which are one there."""
    return [
        _rule(
            rf"multi_head_target\.{name}",
            (f"lin_{to}.weight", f"lin_edge_{to}.weight"),
            lambda x: [x[:, :channels].contiguous(), x[:, channels:].contiguous()],
        )
        for name, to in names.items()
    ]


def tgn(state: State, time_encoder: State) -> dict[str, Tensor]:
    """For `gattn.nn.TGATConv(bias=True, out_proj=True)`, from TGN's `TemporalAttentionLayer`.

    `Temporal Graph Networks for Deep Learning on Dynamic Graphs <https://arxiv.org/abs/2006.10637>`_. Heads have
    `head_channels=(in_channels + time_channels) // heads`.

    Args:
        state: The state dict of the layer, `embedding_module.attention_models.0` of the network's.
        time_encoder: That of the network's `time_encoder`.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    names = {"k_proj_weight": "key", "v_proj_weight": "value"}
    biases = tuple(f"lin_{name}.bias" for name in ("query", "key", "value"))
    return _temporal(
        {**state, **time_encoder},
        r"w\.weight",
        r"w\.bias",
        lambda channels, times: [
            _rule(r"multi_head_target\.q_proj_weight", "lin_query.weight"),
            *_key_rules(names, channels),
            _rule(r"multi_head_target\.in_proj_bias", biases, lambda x: x.chunk(3)),
            _rule(r"multi_head_target\.(out_proj\..*)", r"\1"),
        ],
    )


def tgat(state: State, time_encoder: State) -> dict[str, Tensor]:
    """For `gattn.nn.TGATConv(out_proj=True, residual=True, norm=True)`, from TGAT's `AttnModel`.

    `Inductive Representation Learning on Temporal Graphs <https://arxiv.org/abs/2002.07962>`_. Heads have
    `head_channels=(in_channels + edge_dim + time_channels) // heads`.

    Args:
        state: The state dict of the layer, `attn_model_list.0` of the network's.
        time_encoder: That of the network's `time_encoder`.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    names = {r"w_ks\.weight": "key", r"w_vs\.weight": "value"}

    def query(x: Tensor, channels: int, times: int) -> Tensor:  # the features of its edge are zeros
        return torch.cat([x[:, :channels], x[:, x.size(1) - times :]], 1)

    return _temporal(
        {**state, **time_encoder},
        "basis_freq",
        "phase",
        lambda channels, times: [
            _rule(r"multi_head_target\.w_qs\.weight", "lin_query.weight", lambda x: query(x, channels, times)),
            *_key_rules(names, channels),
            _rule(r"multi_head_target\.fc\.(.*)", r"out_proj.\1"),
            _rule(r"multi_head_target\.layer_norm\.(.*)", r"norm.\1"),
        ],
    )


def hgt(
    state: State,
    node_types: Sequence[str],
    edge_types: Sequence[tuple[str, str, str]],
    relations: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """For `gattn.nn.HGTConv`, from the authors' `HGTConv` (pyHGT).

    `Heterogeneous Graph Transformer <https://arxiv.org/abs/2003.01332>`_, with their `use_norm`, and with their
    `use_RTE` as `use_rte`, whose table of encodings is computed here.

    Args:
        state: The state dict of the layer.
        node_types: The names of the node types, by their numbers there.
        edge_types: The edge types of our layer, in the order of its metadata.
        relations: The number of each one's relation there, which several may share. (default: `None`, 0, 1, ...)

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    numbers = list(range(len(edge_types)) if relations is None else relations)
    rows: dict[str, dict[str, Tensor]] = {}
    rules = [
        *(_rule(rf"a_linears\.{n}\.(.*)", rf"out_lin.lins.{name}.\1") for n, name in enumerate(node_types)),
        *(_rule(rf"norms\.{n}\.(.*)", rf"norms.{name}.\1") for n, name in enumerate(node_types)),
        _rule("skip", [f"skip.{name}" for name in node_types], lambda x: x.unsqueeze(1).unbind(0)),
        _rule(
            "relation_pri",
            ["p_rel." + "__".join(kind) for kind in edge_types],
            lambda x: [x[number].unsqueeze(0) for number in numbers],
        ),
        *(
            _rule(name, f"{to}_rel.weight", lambda x: x[numbers].transpose(0, 1).flatten(0, 1))
            for name, to in (("relation_att", "k"), ("relation_msg", "v"))
        ),
        _rule(r"emb\.emb\.weight", None),
        _rule(r"emb\.lin\.(.*)", r"lin_time.\1"),
        _rule(r"([kqv])_linears\.(\d+)\.(.*)", r"\1 \2 \3"),
    ]
    found = _converted(state, rules)
    for name in [name for name in found if " " in name]:
        kind, number, end = name.split(" ")
        rows.setdefault(f"kqv_lin.lins.{node_types[int(number)]}.{end}", {})[kind] = found.pop(name)
    return found | {name: torch.cat([pieces[kind] for kind in "kqv"]) for name, pieces in rows.items()}


def sgformer(state: State) -> dict[str, Tensor]:
    """For `gattn.models.SGFormer(norm="frobenius", qkv_bias=True)`, from the authors' `SGFormer`.

    `SGFormer: Simplifying and Empowering Transformers for Large-Graph Representations
    <https://arxiv.org/abs/2306.10759>`_, with their `use_weight` and without their `use_init`. Their network returns
    logits, ours and PyG's their logarithms of probabilities.

    Args:
        state: The state dict of the network.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    return _converted(
        state,
        [
            _rule(r"trans_conv\.convs\.(\d+)\.W([qkv])\.(.*)", r"trans_conv.attns.\1.\2.\3"),
            _rule(r"graph_conv\.convs\.(\d+)\.W\.weight", r"graph_conv.convs.\1.lin.weight"),
            _rule(r"graph_conv\.convs\.(\d+)\.W\.bias", r"graph_conv.convs.\1.bias"),
            _rule(r"((?:trans|graph)_conv\.(?:fcs|bns)\..*|fc\..*)", r"\1"),
        ],
    )


def polynormer(state: State) -> dict[str, Tensor]:
    """For `gattn.models.Polynormer`, from the authors' `Polynormer`.

    `Polynormer: Polynomial-Expressive Graph Transformer in Linear Time <https://arxiv.org/abs/2403.01232>`_, with
    `qk_shared=True, post_bn=False, local_attn=True, lin_in=True, qkv_bias=True`, and `learn_beta=True` for their
    `beta=-1`. Their network returns logits, ours and PyG's their logarithms of probabilities.

    Args:
        state: The state dict of the network.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    depth = next((len(x) for name, x in state.items() if name.endswith("global_attn.betas")), 0)
    outs = [rf"global_attn.{number}.lin_out.\1" for number in range(depth)]  # which all layers share there
    return _converted(
        state,
        [
            _rule(r"local_convs\.(\d+)\.lin_src\.weight", r"local_convs.\1.lin.weight"),  # of older versions of PyG
            _rule(r"((?:local_convs|h_lins|lins|lns|lin_in|ln|pred_local|pred_global)\..*|betas)", r"\1"),
            _rule(r"global_attn\.betas", [f"global_attn.{n}.betas" for n in range(depth)], lambda x: x.unbind(0)),
            _rule(r"global_attn\.lin_out\.(.*)", outs),
            _rule(r"global_attn\.(h_lins|lns)\.(\d+)\.(.*)", r"global_attn.\2.\1.\3"),
            _rule(r"global_attn\.([qkv])_lins\.(\d+)\.(.*)", r"global_attn.\2.\1.\3"),
        ],
    )


def graphormer(state: State, cutoff: int = 5, path_cutoff: int | None = None) -> dict[str, Tensor]:
    r"""For `gattn.models.Graphormer(norm_first=False, embedding_norm=True, head="gelu")`, from the authors' network.

    `Do Transformers Really Perform Bad for Graph Representation? <https://arxiv.org/abs/2106.05234>`_, in the form of
    the models for PCQM4M. Their features are categories, numbered anew for each of a node's; ours are vectors. For
    node features :math:`x_{ik} \in \{1, 2, \dots\}` (zero is padding), pass :math:`\sum_k` `one_hot(x[:, k])`, with
    `in_channels` the number of their rows, and for edges the mean of these instead of the sum. `max_degree` is two less
    than the number of their rows.

    Args:
        state: The state dict of the network; names may begin with `"encoder."`.
        cutoff: The largest distance with a bias of its own, as in our network. Farther nodes get the bias of the next
            one. (default: `5`)
        path_cutoff: The number of edges of a path that count, their `multi_hop_max_dist`. (default: `None`, `cutoff`)

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names, or too few distances.
    """
    state = {name.removeprefix("encoder."): tensor for name, tensor in state.items()}
    length = cutoff if path_cutoff is None else path_cutoff
    bias, feature = r"graph_encoder\.graph_attn_bias\.", r"graph_encoder\.graph_node_feature\."
    kinds = state.get("graph_encoder.graph_attn_bias.edge_encoder.weight")
    hops = state.get("graph_encoder.graph_attn_bias.edge_dis_encoder.weight")
    table: Tensor | None = None  # what each step adds for each kind of edge, [L, H, kinds]
    if kinds is not None and hops is not None:
        heads = kinds.size(1)
        table = torch.einsum("kg,lgh->lhk", kinds, hops.view(-1, heads, heads)[:length])

    def distances(x: Tensor) -> Tensor:  # 0 is padding, 1 is distance 0, and the last is that of nodes without a path
        if len(x) <= cutoff + 3:
            raise InputError(f"there are biases for {len(x) - 2} distances, too few for cutoff={cutoff}.")
        rows = torch.cat([x[1 : cutoff + 3], x[-1:]])
        if table is None:
            return rows
        # The row of padding is not zero there, and counts for each step that a path lacks.
        padding = torch.stack([table[step:, :, 0].sum(0) for step in range(length + 1)])
        steps = [*range(cutoff + 2), 0]
        steps_of = [*(min(max(step, 1), length) for step in range(cutoff + 2)), length]
        return rows + torch.stack([padding[min(n, length)] / of for n, of in zip(steps, steps_of, strict=True)])

    rules = [
        _rule(feature + r"atom_encoder\.weight", "lin_in.weight", lambda x: x.t().contiguous()),
        _rule(feature + r"in_degree_encoder\.(.*)", r"degrees.encoder1.\1", lambda x: x[1:]),
        _rule(feature + r"out_degree_encoder\.(.*)", r"degrees.encoder2.\1", lambda x: x[1:]),
        _rule(feature + r"graph_token\.(.*)", r"token.\1"),
        _rule(bias + r"spatial_pos_encoder\.weight", "distances.weight", distances),
        _rule(bias + r"graph_token_virtual_distance\.(.*)", r"token_bias.\1"),
        _rule(bias + r"edge_(?:dis_)?encoder\.weight", None),  # whose product is below
        _rule(r"graph_encoder\.emb_layer_norm\.(.*)", r"embedding_norm.\1"),
        _rule(r"graph_encoder\.layers\.(\d+)\.self_attn\.(.*)", r"layers.\1.attn.\2"),
        _rule(r"graph_encoder\.layers\.(\d+)\.self_attn_layer_norm\.(.*)", r"layers.\1.attn_layer_norm.\2"),
        _rule(r"graph_encoder\.layers\.(\d+)\.fc1\.(.*)", r"layers.\1.ffn.0.\2"),
        _rule(r"graph_encoder\.layers\.(\d+)\.fc2\.(.*)", r"layers.\1.ffn.3.\2"),
        _rule(r"graph_encoder\.layers\.(\d+)\.final_layer_norm\.(.*)", r"layers.\1.ffn_layer_norm.\2"),
        _rule(r"graph_encoder\.final_layer_norm\.(.*)", r"norm.\1"),
        _rule(r"lm_head_transform_weight\.(.*)", r"lin_head.\1"),
        _rule(r"layer_norm\.(.*)", r"head_norm.\1"),
        _rule(r"embed_out\.weight", "lin_out.weight"),
        _rule("lm_output_learned_bias", "lin_out.bias"),
        _rule(r"masked_lm_pooler\..*", None),  # which is not used
    ]
    found = _converted(state, rules)
    if "lin_in.weight" in found:
        found["lin_in.bias"] = found["lin_in.weight"].new_zeros(found["lin_in.weight"].size(0))
    if table is not None:
        found["paths.embedding_table.weight"] = table.flatten(0, 1)
    return found


def set_transformer(state: State) -> dict[str, Tensor]:
    """For Set Transformer's blocks with `projected=True`, from the authors' `MAB`, `SAB`, `ISAB` and `PMA`.

    `Set Transformer <https://arxiv.org/abs/1810.00825>`_; `PoolingByMultiheadAttention` needs `lin=False`, too. In a
    sequence of blocks, names keep what comes before.

    Args:
        state: The state dict of the block, or of a sequence of them.

    Returns:
        That of ours.

    Raises:
        ValueError: If there are other names.
    """
    ends = {
        **{"fc_q": "attn.lin_query", "fc_k": "attn.lin_key", "fc_v": "attn.lin_value"},
        **{"fc_o": "lin", "ln0": "layer_norm1", "ln1": "layer_norm2"},
    }
    blocks = {"mab0": "mab1", "mab1": "mab2", "mab": "mab"}
    rules = [
        *(
            _rule(rf"((?:.*\.)?){block}\.{name}\.(.*)", rf"\g<1>{to}.{end}.\2")
            for block, to in blocks.items()
            for name, end in ends.items()
        ),
        *(_rule(rf"((?:.*\.)?){name}\.(.*)", rf"\g<1>{end}.\2") for name, end in ends.items()),
        _rule(r"((?:.*\.)?)I", r"\g<1>ind"),
        _rule(r"((?:.*\.)?)S", r"\g<1>seed"),
    ]
    return _converted(state, rules)
