"""LoRA: low-rank adapters for gattn's layers, by Hugging Face's `peft`.

`peft` knows `torch.nn.Linear` and `torch.nn.MultiheadAttention`, of which `gattn.nn.MultiheadAttention` is one, but
neither PyG's linear layers nor gattn's own, which are made like these. `config` makes a `peft.LoraConfig` that does.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch_geometric.nn.dense import Linear as PyGLinear

from gattn.nn import MultiheadAttention

__all__ = ["config"]


def config(model: Module, r: int = 8, **options: Any) -> Any:
    """Returns a `peft.LoraConfig` that adapts every linear layer of a model, those inside of gattn's layers included.

    Multi-head attention is adapted as a whole, as `peft` does it. Layers whose weights are shared with others, such as
    those of an output layer with the embedding, are left out, since merged adapters would change both.

    Pass the result to `peft.get_peft_model(model, config)`, which freezes the model and adds the adapters. To load
    saved adapters, pass it to `peft.PeftModel.from_pretrained(model, folder, config=config)`, since files do not say
    what these layers are.

    Args:
        model: The model, of any layers. Linear layers with lazy sizes must have been called once.
        r: The rank of the adapters. (default: `8`)
        **options: Further arguments of `peft.LoraConfig`, such as `lora_alpha`, `lora_dropout` or `modules_to_save`.
            `target_modules` takes the place of all linear layers.

    Raises:
        ImportError: If `peft` is not installed.
        ValueError: If the model has no linear layers, or some whose sizes are not known yet.

    Example:
        >>> import gattn, pytest
        >>> peft = pytest.importorskip("peft")
        >>> conv = gattn.nn.GATConv(16, 8, heads=2)
        >>> adapted = peft.get_peft_model(conv, gattn.lora.config(conv, r=4))
        >>> sorted(name for name, x in adapted.named_parameters() if x.requires_grad)  # doctest: +NORMALIZE_WHITESPACE
        ['base_model.model.lin.lora_A.default.weight', 'base_model.model.lin.lora_B.default.weight']
    """
    try:
        from peft import LoraConfig
        from peft.tuners.lora import Linear as Adapted
    except ImportError as error:
        raise ImportError("gattn.lora needs peft: pip install peft") from error
    if options.get("target_modules") is None:
        options["target_modules"] = _linear_layers(model)

    def adapt(layer: Any, name: str, **given: Any) -> Module:
        if not hasattr(layer, "in_features"):  # PyG's own, which have other names
            layer.in_features, layer.out_features = layer.in_channels, layer.out_channels
        made: Module = Adapted(layer, name, **given)
        return made

    config = LoraConfig(r=r, **options)
    config._register_custom_module({PyGLinear: adapt})
    return config


def _linear_layers(model: Module) -> list[str]:
    """The names of all layers that adapters are added to."""
    names, inside = [], set()
    uses = Counter(id(x) for _, module in model.named_modules() for x in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            if _is_one(module):
                names.append(name)
            if _is_one(module) or not isinstance(module, MultiheadAttention):
                inside.add(f"{name}.out_proj".lstrip("."))  # which `peft` adapts itself, or PyTorch does not call
        elif isinstance(module, (PyGLinear, torch.nn.Linear)) and name not in inside:
            if is_lazy(module.weight):
                raise ValueError(f"{name} has a lazy size: call the model once before you add adapters.")
            if uses[id(module.weight)] == 1:
                names.append(name)
    if not names or names == [""]:
        raise ValueError(f"{type(model).__name__} has no linear layers inside: pass the model that contains it.")
    return names


def _is_one(attention: torch.nn.MultiheadAttention) -> bool:
    """Whether the projections are one square matrix for each of query, key and value, as `peft` needs it."""
    weight = attention.in_proj_weight
    return bool(weight is not None and len(weight) == 3 * attention.embed_dim)
