"""The masks of `transformers` as graphs.

Dimensions: B texts, N targets, M sources, H heads, C channels.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from copy import copy
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from gattn.errors import InputError
from gattn.graphs import CompleteGraph
from gattn.huggingface.positions import WITH_DISTANCES, keep_distances

__all__ = ["GraphMask", "Pattern", "Plan", "graph_mask"]


class Pattern(NamedTuple):
    """Which pairs of tokens a mask function lets through, besides padding."""

    left: int | None = None
    """How far before its own position a target sees; `None` means no limit"""
    right: int | None = None
    """How far after it"""
    chunks: tuple[tuple[int, Tensor | None], ...] = ()
    """The size of chunks of positions, and the padding before each text, `[B]`"""
    texts: tuple[Tensor, ...] = ()
    """The number of each token's text, `[B, M]`, of texts that are packed"""

    def and_(self, other: Pattern) -> Pattern:
        """The pairs that both let through."""

        def nearest(*ends: int | None) -> int | None:
            return min((end for end in ends if end is not None), default=None)

        left, right = nearest(self.left, other.left), nearest(self.right, other.right)
        return Pattern(left, right, self.chunks + other.chunks, self.texts + other.texts)


class Plan(NamedTuple):
    """How the attention of a mask is computed."""

    graph: CompleteGraph
    num_sources: int
    """Sources beyond these are seen by nobody"""
    mask: Tensor | None = None
    """Which sources are seen, broadcastable to `[B, 1, N, M]`"""
    targets: Tensor | None = None
    """The targets of a packed graph among those of all texts"""
    sources: Tensor | None = None


def _code(name: str, *arguments: Any) -> CodeType | None:
    """The code of the mask functions that a function of `transformers` returns, by which they are recognised."""
    make = getattr(masking_utils, name, None)
    return None if make is None else make(*arguments).__code__


def _causal(*_: Any) -> Any: ...


_CODE = {
    "and": _code("and_masks", _causal),
    "before": _code("sliding_window_overlay", 1),
    "around": _code("sliding_window_bidirectional_overlay", 1),
    "packed": _code("packed_sequence_mask_function", torch.ones(1)),
    "remapped": _code("remap_positions_for_packed_sequence", _causal, torch.ones(1)),
    "chunk": _code("chunked_overlay", 1, *[torch.zeros(1)] * (masking_utils.chunked_overlay.__code__.co_argcount - 1)),
}
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)


def _pattern(function: Callable[..., Any]) -> Pattern | None:
    """What a mask function of `transformers` lets through; `None` if it is not one that is known."""
    if function is masking_utils.causal_mask_function:
        return Pattern(None, 0)
    if function is _BIDIRECTIONAL:
        return Pattern()
    if torch.compiler.is_compiling():  # which cannot read closures
        return None
    code = getattr(function, "__code__", None)
    kind = next((kind for kind, known in _CODE.items() if known is not None and code is known), None)
    if kind is None or code is None:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    if kind == "and":
        found: Pattern | None = Pattern()
        for part in map(_pattern, cells["mask_functions"]):
            found = None if found is None or part is None else found.and_(part)
        return found
    if kind == "remapped":  # positions restart with each text, so distances within one are those of the tokens
        inner = _pattern(cells["mask_function"])
        if inner is None or not inner.chunks:
            return inner
        return None
    if kind == "packed":
        return Pattern(texts=(cells["packed_sequence_mask"],))
    if kind == "chunk":
        return Pattern(chunks=((cells["chunk_size"], cells.get("left_padding")),))
    window = cells["sliding_window"]
    return Pattern(window - 1, None) if kind == "before" else Pattern(window, window)


def graph_mask(
    batch_size: int,
    q_length: Any = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    *,
    cache_position: Tensor | None = None,
    **options: Any,
) -> Any:
    """What `transformers` calls to make a mask for `"gattn"`: a `GraphMask`, which layers pass on to `attention`.

    Args:
        batch_size: B.
        q_length: N; or the positions of the targets, which older versions pass here.
        kv_length: M.
        q_offset: The position of the first target. (default: `0`)
        kv_offset: The position of the first source. (default: `0`)
        mask_function: Whether two positions of a text see each other. (default: the causal one)
        attention_mask: Which positions are no padding, `[B, M]`. (default: `None`, all)
        cache_position: The positions of the targets, which older versions pass.
        **options: Others of `transformers.masking_utils.sdpa_mask`.

    Example:
        >>> from gattn.huggingface import graph_mask
        >>> graph_mask(2, 5, 5)
        GraphMask(2 texts, CompleteGraph(5, 5, causal=True))
    """
    config = None if torch.compiler.is_compiling() else options.get("config")
    if config is not None and config.model_type in WITH_DISTANCES:
        keep_distances(config.model_type)
    if isinstance(attention_mask, GraphMask):  # made in advance, as generate() does
        return attention_mask
    if isinstance(q_length, Tensor):
        cache_position, q_length = q_length, None
    arguments = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, **options}
    arguments |= {"mask_function": mask_function, "attention_mask": attention_mask}
    if cache_position is None:
        arguments |= {"q_length": q_length, "q_offset": q_offset}
    else:
        arguments |= {"cache_position": cache_position}
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    if config is not None and not _asks_registry(type(config)):
        _warn(f"{config.model_type} has attention of its own, which runs instead of gattn's")
        return masking_utils.eager_mask(**arguments)
    return GraphMask(q_length, q_offset, arguments)


def _asks_registry(config: type) -> bool:
    """Whether a model asks transformers for its attention function; one of unknown origin is taken to do so."""
    module = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
    return module is None or not config.__module__.startswith("transformers.") or hasattr(module, _REGISTRY)


class GraphMask:
    """What layers of `transformers` get as their attention mask: who attends to whom, without a tensor of all pairs.

    A model that computes with it gets the Boolean tensor `[B, 1, N, M]` that it stands for, and a warning.

    Args:
        num_targets: N.
        q_offset: The position of the first target.
        arguments: Those of `transformers.masking_utils.sdpa_mask`, from which the tensor is made.

    Example:
        >>> from gattn.huggingface import graph_mask
        >>> mask = graph_mask(1, 3, 3)
        >>> mask.shape
        torch.Size([1, 1, 3, 3])
        >>> mask.dense()[0, 0]
        tensor([[ True, False, False],
                [ True,  True, False],
                [ True,  True,  True]])
    """

    dtype = torch.bool
    ndim = 4

    def __init__(self, num_targets: int, q_offset: Any, arguments: dict[str, Any]):
        self.num_targets, self.arguments = num_targets, arguments
        self.num_sources = arguments["kv_length"]
        self.batch_size = arguments["batch_size"]
        first = arguments["kv_offset"]
        if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
            q_offset = int(q_offset)
        self.offset = q_offset - first
        #: The position of target 0 among the sources, a tensor in a compiled program.
        self.pattern = None if isinstance(self.offset, Tensor) else _pattern(arguments["mask_function"])
        self.first = first
        self.keep = self._keep(arguments["attention_mask"], first)
        self._dense: Tensor | None = None
        self._plans: dict[Any, Plan] = {}

    def _keep(self, padding: Tensor | None, first: int) -> Tensor | None:
        """Which sources are tokens, `[B, M]`; `None` if all are."""
        if padding is None:
            return None
        end = first + self.num_sources
        padding = F.pad(padding, (0, max(end - padding.shape[-1], 0)))[:, first:end].bool()
        return None if not torch.compiler.is_compiling() and bool(padding.all()) else padding

    @property
    def shape(self) -> torch.Size:
        """That of the tensor: `[B, 1, N, M]`."""
        return torch.Size((self.batch_size, 1, self.num_targets, self.num_sources))

    @property
    def device(self) -> Any:
        """Where the tensor would be."""
        return torch.device(self.arguments.get("device", "cpu"))

    def size(self, dim: int | None = None) -> Any:
        """As of the tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of the tensor."""
        return 4

    def dense(self) -> Tensor:
        """The Boolean tensor, `[B, 1, N, M]`: which pairs attend."""
        if self._dense is None:
            options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._dense = masking_utils.sdpa_mask(**{**self.arguments, **options})
        return self._dense[..., : self.num_sources]

    def additive(self, dtype: torch.dtype) -> Tensor:
        """The tensor that eager attention adds to its logits: zero, or the least number where no pair is."""
        dense = self.dense()
        return torch.zeros_like(dense, dtype=dtype).masked_fill(~dense, torch.finfo(dtype).min)

    def __getitem__(self, places: Any) -> Any:
        whole = slice(None)
        if isinstance(places, tuple) and len(places) == 4 and all(place == whole for place in places[:3]):
            last = places[3]
            if isinstance(last, slice) and last.start in (None, 0) and last.step is None:
                cut = copy(self)  # to the length of the keys
                cut.num_sources = len(range(self.num_sources)[last])
                return cut
        return self._asked()[places]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._asked(), name)

    def _asked(self) -> Tensor:
        """The tensor, for a model that computes with its mask."""
        _warn("a model computes with its attention mask")
        return self.dense()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets PyTorch's functions have the tensor; what is added to logits is not the Boolean one."""
        if function in _ADDING and isinstance(args[0], Tensor) and args[0].is_floating_point():
            args[1]._asked()
            return function(args[0], args[1].additive(args[0].dtype), *args[2:], **(kwargs or {}))
        args, kwargs = (
            torch.utils._pytree.tree_map(lambda x: x._asked() if isinstance(x, GraphMask) else x, given)
            for given in (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The mask itself, unless another type is asked for; numbers are those that are added to logits."""
        for dtype in (x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype) and x != torch.bool):
            mask = self._asked()
            return self.additive(dtype) if dtype.is_floating_point else mask.to(dtype)
        return self

    def plan(self, num_sources: int, self_attends: bool, whole: bool) -> Plan:
        """How to compute the attention.

        Args:
            num_sources: How many keys there are.
            self_attends: Whether targets are sources, too, so that those of padding need not be computed.
            whole: Whether all texts stay in one tensor, padding included, as biases and returned weights need.
        """
        key = num_sources, self_attends, whole
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        return self._plans[key]

    def _plan(self, num_sources: int, self_attends: bool, whole: bool) -> Plan:
        n, m, offset = self.num_targets, num_sources, self.offset
        if num_sources > self.num_sources:
            raise InputError(f"the mask is for {self.num_sources} keys, and the layer has {num_sources}.")
        pattern = self.pattern
        if pattern is not None and pattern.right == 0:
            m = min(m, n + offset)  # a static cache has more, which no target sees
        if pattern is not None and pattern[:2] != (None, None) and m - n != offset:
            pattern = None
        if pattern is None:
            if self.pattern is None and not torch.compiler.is_compiling():
                _warn(f"gattn does not know the mask function {_name(self.arguments['mask_function'])}")
            return Plan(CompleteGraph(n, num_sources), num_sources, self.dense()[..., :num_sources])
        reach: dict[str, Any] = {"causal": pattern.right == 0}
        if pattern.left is not None:
            reach = {"window": (pattern.left, m if pattern.right is None else pattern.right)}
        keep = None if self.keep is None else self.keep[:, :m]
        if keep is None and not pattern.chunks and not pattern.texts:
            return Plan(CompleteGraph(n, m, **reach), m)
        self_attends |= pattern.right == 0
        block = self._blocks(pattern, m)
        has_window = pattern.left is not None
        if n == 1 or whole or torch.compiler.is_compiling() or (has_window and keep is not None and _has_holes(keep)):
            mask = None if keep is None else keep[:, None, None]
            if block is not None:
                same = (block[:, offset : offset + n, None] == block[:, None])[:, None]
                mask = same if mask is None else mask & same
            return Plan(CompleteGraph(n, m, **reach), m, mask)
        return self._packed(block, keep, m, self_attends, reach)

    def _blocks(self, pattern: Pattern, num_sources: int) -> Tensor | None:
        """The number of the block of each source, `[B, M]`, ascending in each text; `None` if there is one."""
        numbers = [text[:, :num_sources] for text in pattern.texts]
        for size, padding in pattern.chunks:
            position = torch.arange(self.first, self.first + num_sources, device=self.device)[None]
            position = position if padding is None else position - padding[:, None]
            numbers.append(position.div(size, rounding_mode="floor"))
        if not numbers:
            return None
        block = numbers[0].expand(self.batch_size, -1)
        block = block - block[:, :1]
        for number in numbers[1:]:
            block = block * (num_sources + 1) + (number - number[:, :1])
        return block

    def _packed(
        self, block: Tensor | None, keep: Tensor | None, num_sources: int, self_attends: bool, reach: dict[str, Any]
    ) -> Plan:
        """One graph of all texts, laid end to end without padding."""
        device, batch = self.device, self.batch_size
        block = torch.zeros(batch, num_sources, dtype=torch.int64, device=device) if block is None else block
        block = block + (torch.arange(batch, device=device) * (int(block.max()) + 1))[:, None]
        own = slice(self.offset, self.offset + self.num_targets)
        if self_attends:
            of_targets, keep_targets = block[:, own], None if keep is None else keep[:, own]
        else:
            of_targets, keep_targets = block[:, :1].expand(-1, self.num_targets), None
        sides = []
        for blocks, kept in ((of_targets, keep_targets), (block, keep)):
            places = None if kept is None else kept.flatten().nonzero().squeeze(1)
            blocks = blocks.flatten() if places is None else blocks.flatten()[places]
            sides.append((blocks.bincount(minlength=int(block.max()) + 1), places))
        (num_targets, targets), (sizes, sources) = sides
        there = (num_targets + sizes) > 0
        graph = CompleteGraph.packed(num_targets[there], sizes[there], **reach)
        return Plan(graph, num_sources, None, targets, sources)

    def __repr__(self) -> str:
        known = "a Boolean mask"
        if self.pattern is not None:
            known = str(self._plan(self.num_sources, False, True).graph)
        return f"GraphMask({self.batch_size} texts, {known})"


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: GraphMask, *others: Any) -> Any:
        others = tuple(x.dense() if isinstance(x, GraphMask) else x for x in others)
        mask = self._asked()
        if "add" in name and isinstance(others[0], Tensor) and others[0].is_floating_point():
            mask = self.additive(others[0].dtype)
        return getattr(mask, name)(*others)

    return compute


_SYMBOLS = "and or xor add sub mul rand ror rxor radd rsub rmul invert eq ne gt lt"
for _symbol in _SYMBOLS.split():
    setattr(GraphMask, f"__{_symbol}__", _operator(f"__{_symbol}__"))
GraphMask.__hash__ = object.__hash__  # type: ignore[method-assign]


_ADDING = {torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__iadd__}


def _has_holes(keep: Tensor) -> bool:
    """Whether there is padding between tokens of the same text, which would change distances if it was left out."""
    return bool(((keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0] > 1).any())


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function)).replace(".<locals>.", "/")


_warned: set[str] = set()


def _warn(reason: str) -> None:
    """Warns once that there is a tensor of all pairs."""
    if not torch.compiler.is_compiling() and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"{reason}, so it has a tensor of all pairs of tokens [B, 1, N, M].", UserWarning, stacklevel=2)
