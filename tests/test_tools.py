"""Tools around PyTorch on gattn's layers, each beside what it does on PyTorch's own or on the layer without the tool.

The packages are those of the extra `tools`; where one is missing, its tests are skipped. Loaders and checkpoints of
activations are in `test_training_tools.py`, and several processes in `test_distributed.py`.
"""

import copy
import io
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.testing import assert_close

import gattn
from gattn.testing import random_edge_index
from tests.layers import LAYERS, MODELS, Called, Draw, made, row, tensors

pytestmark = [
    pytest.mark.tools,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of the tools
]

NODES = 12
EDGES = random_edge_index(NODES, NODES, 50)


class Network(nn.Module):
    """A graph layer of each kind of score, and a Transformer layer on the same graph."""

    def __init__(self):
        super().__init__()
        self.gat = gattn.nn.GATConv(8, 4, heads=2)
        self.gatv2 = gattn.nn.GATv2Conv(8, 4, heads=2)
        self.conv = gattn.nn.TransformerConv(8, 4, heads=2)
        self.layer = gattn.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.out = nn.Linear(8, 3)

    def forward(self, x, edge_index=EDGES):
        for conv in (self.gat, self.gatv2, self.conv):
            x = conv(x, edge_index).relu()
        return self.out(self.layer(x, graph=edge_index))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def x():
    return torch.randn(NODES, 8, generator=torch.Generator().manual_seed(1))


def gradients(model, x):
    model.zero_grad()
    model(x).sin().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# LoRA -----------------------------------------------------------------------------------------------------------------

#: Without a linear layer that an adapter fits: none at all, or grouped ones.
NO_LINEARS = {"DNAConv"}


def linear_layers(name):
    kinds = nn.Linear, nn.MultiheadAttention, gattn.nn.shared.linear.PyGLinear
    return name not in NO_LINEARS and any(isinstance(module, kinds) for module in made(name).modules())


def some(names):
    """The first layers always, and all of them among the slow tests."""
    quick = (
        "GATConv",
        "GATv2Conv",
        "TransformerConv",
        "HGTConv",
        "GPSConv",
        "TransformerDecoderLayer",
        "TransformerLM",
    )
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", some(name for name in {**LAYERS, **MODELS} if linear_layers(name)))
def test_adapters_have_an_effect_in_every_layer(name):
    """Outputs change, every adapter gets a gradient, and merged layers compute what they did with adapters."""
    peft = pytest.importorskip("peft")
    model, inputs = Called(name), row(name).inputs(Draw())

    def run(module):
        torch.manual_seed(0)
        return [out for out in tensors(module(*inputs)) if out.is_floating_point()]

    before = run(model)
    given = [out for out in before if out.requires_grad]
    if given:  # but for a sampled neighbour
        torch.autograd.backward(given, [torch.randn_like(out) for out in given])
    used = {name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()}
    assert used or not given
    adapted = peft.get_peft_model(model, gattn.lora.config(model, r=2, init_lora_weights=False)).eval()
    found = run(adapted)
    assert any(not torch.allclose(out, other) for out, other in zip(found, before, strict=True))
    given = [out for out in found if out.requires_grad]
    if given:
        torch.autograd.backward(given, [torch.randn_like(out) for out in given])
    for parameter_name, parameter in adapted.named_parameters():
        layer, _, adapter = parameter_name.removeprefix("base_model.model.").partition(".lora_")
        layer = layer.replace("base_layer.", "")
        if adapter and not used.isdisjoint((f"{layer}.weight", f"{layer}.in_proj_weight")):
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.any(), parameter_name
    assert_close(run(adapted.merge_and_unload()), found)


@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_lora_as_in_pytorch(kind):
    """With the same adapters, outputs and gradients are those of PyTorch's layer, without anything registered."""
    peft = pytest.importorskip("peft")
    options = {} if kind == "MultiheadAttention" else {"dim_feedforward": 16, "dropout": 0.0}
    layers = [getattr(module.nn, kind)(8, 2, **options).double() for module in (gattn, torch)]
    layers[1].load_state_dict(layers[0].state_dict())
    targets = gattn.lora.config(nn.ModuleDict({"0": layers[0]})).target_modules
    assert targets == gattn.lora.config(nn.ModuleDict({"0": layers[1]})).target_modules
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets)
    ours, theirs = (peft.get_peft_model(nn.ModuleDict({"0": layer}), config) for layer in layers)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randn(5, 3, 8, dtype=torch.double)
    given = [tokens] * (1 + kind.count("Decoder") + 2 * (kind == "MultiheadAttention"))
    found = []
    for model in (ours, theirs):
        out = tensors(model.base_model.model["0"](*given))[0]
        out.sin().sum().backward()
        found.append((out, [p.grad for p in model.parameters() if p.requires_grad]))
        assert all(grad.any() for grad in found[-1][1])
    assert_close(*found)


def test_lora_trains_is_saved_and_loaded(network, x, tmp_path):
    peft = pytest.importorskip("peft")
    alone, y = copy.deepcopy(network), torch.randn(NODES, 3)
    frozen = {name: parameter.clone() for name, parameter in network.named_parameters()}
    adapted = peft.get_peft_model(network, gattn.lora.config(network, r=4, lora_dropout=0.1))
    assert_close(adapted(x), alone(x))  # adapters begin as zeros
    optimizer, losses = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], 0.02), []
    for _ in range(40):
        losses.append((adapted(x) - y).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    for name, parameter in adapted.named_parameters():
        name = name.removeprefix("base_model.model.").replace("base_layer.", "")
        if name in frozen:  # but for rounding, where `peft` adds adapters to a weight and takes them off again
            assert_close(parameter, frozen[name], rtol=1e-4, atol=1e-5)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(alone, tmp_path, config=gattn.lora.config(alone, r=4))
    found = adapted.eval()(x)
    assert_close(loaded.eval()(x), found)
    assert_close(loaded.merge_and_unload()(x), found, rtol=5e-6, atol=5e-6)
    with adapted.disable_adapter():
        assert not torch.allclose(adapted(x), found)


def test_lora_leaves_out_what_it_cannot_adapt():
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict(
        {
            "grouped": gattn.nn.MultiheadAttention(8, 4, num_kv_heads=2),
            "tied": nn.Linear(8, 5, bias=False),
            "embedding": nn.Embedding(5, 8),
            "of_pyg": gattn.nn.shared.linear.PyGLinear(8, 8),
        }
    )
    model["tied"].weight = model["embedding"].weight
    config = gattn.lora.config(model, init_lora_weights=False)
    assert config.target_modules == {"grouped.out_proj", "of_pyg"}
    tokens = torch.randn(4, 8)
    before = model["grouped"](tokens, tokens, tokens)[0], model["of_pyg"](tokens)
    adapted = peft.get_peft_model(model, config).base_model.model
    assert not torch.allclose(adapted["grouped"](tokens, tokens, tokens)[0], before[0])
    assert not torch.allclose(adapted["of_pyg"](tokens), before[1])
    with pytest.raises(ValueError, match="call the model once"):
        gattn.lora.config(nn.Sequential(gattn.nn.GATConv(-1, 4)))
    with pytest.raises(ValueError, match="no linear layers"):
        gattn.lora.config(nn.Sequential(nn.ReLU()))


def test_lora_says_what_is_missing(network, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        gattn.lora.config(network)


# Where parameters are -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["memory", "disk"])
def test_accelerate_offloads(network, x, to, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = network(x)
    device = torch.device("cpu")
    if to == "memory":
        moved = accelerate.cpu_offload(network, device)
    else:
        moved = accelerate.disk_offload(network, tmp_path, device)
        assert any(tmp_path.iterdir())
    assert all(parameter.is_meta for parameter in moved.parameters())
    with torch.no_grad():
        assert_close(moved(x), expected)


def test_accelerate_makes_empty_weights(network, x, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    torch.save(network.state_dict(), tmp_path / "model.bin")
    with accelerate.init_empty_weights():
        empty = Network()
    assert all(parameter.is_meta for parameter in empty.parameters())
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / "model.bin"), device_map={"": "cpu"})
    assert_close(loaded(x), network(x))


def test_safetensors(network, x, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(1)
    other = Network()
    safetensors.save_model(network, tmp_path / "model.safetensors")
    assert not torch.allclose(other(x), network(x))
    safetensors.load_model(other, tmp_path / "model.safetensors")
    assert_close(other(x), network(x))


def test_whole_module_pickles(network, x):
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_close(loaded(x), network(x))
    assert_close(gradients(loaded, x), gradients(network, x))


@pytest.fixture
def mesh():
    if not dist.is_gloo_available():
        pytest.skip("PyTorch has no gloo here")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("by", ["DDP", "FSDP2"])
def test_data_parallel(network, x, mesh, by):
    """On one process, whose gradients are those of the model alone."""
    expected = gradients(network, x)
    if by == "DDP":
        parallel = DistributedDataParallel(network)
    else:
        fully_shard(network.layer, mesh=mesh)
        parallel = fully_shard(network, mesh=mesh)
    found = gradients(parallel, x)
    found = {
        name.removeprefix("module."): getattr(grad, "full_tensor", lambda g=grad: g)() for name, grad in found.items()
    }
    assert_close(found, expected)


# Other numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_int8(network, x, config):
    """Quantised linear layers are called: what comes out is what their rounded weights give."""
    quantization = pytest.importorskip("torchao.quantization")
    exact, linears = network(x), []

    def is_linear(module, name):
        chosen = isinstance(module, nn.Linear) or type(module).__name__ == "Linear"
        linears.append(name) if chosen else None
        return chosen

    quantization.quantize_(network, getattr(quantization, config)(), filter_fn=is_linear)
    assert {"gat.lin", "gatv2.lin_r", "conv.lin_key", "layer.self_attn.out_proj", "layer.linear1", "out"} <= {*linears}
    with torch.no_grad():
        found = network(x)
        difference = (found - exact).abs().max()
        assert 0 < difference < 0.1 * exact.abs().max()
        if config == "Int8WeightOnlyConfig":
            rounded = Network()
            state = {
                n: p.dequantize() if hasattr(p, "dequantize") and type(p) is not nn.Parameter else p
                for n, p in network.state_dict().items()
            }
            rounded.load_state_dict(state)
            assert_close(found, rounded(x), rtol=1e-4, atol=1e-5)


def test_lightning_with_bfloat16(x, tmp_path):
    """Outputs are half precision's, parameters stay in single, and training changes them."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.losses = Network(), []

        def training_step(self, batch, _):
            out = self.network(batch[0][0])
            assert out.dtype == torch.bfloat16
            self.losses.append((out.float() - batch[0][0, :, :3]).square().mean())
            return self.losses[-1]

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.01)

    torch.manual_seed(0)
    module = Module()
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=40, accelerator="cpu", precision="bf16-mixed", default_root_dir=tmp_path, **options
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of few workers
        trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[None])))
    assert module.losses[-1] < module.losses[0] / 2
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


def test_averaged_models(network, x):
    """An exponential average of parameters is a network with these averages."""
    averaged = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(network)
    expected = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(3):
        gradients(network, x)
        optimizer.step()
        averaged.update_parameters(network)
        expected = {name: 0.9 * old + 0.1 * network.get_parameter(name).detach() for name, old in expected.items()}
    update_bn([x], averaged)
    assert not torch.allclose(averaged(x), network(x))
    network.load_state_dict(expected)
    assert_close(averaged(x), network(x))


WEIGHTS = ("gat.lin", "gatv2.lin_l", "conv.lin_value", "layer.self_attn.out_proj", "layer.linear1")


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal", "prune"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_parametrisations(network, x, name, kind):
    """A layer with a parametrised weight computes what one with that weight does, and gradients reach the original."""
    layer = network.get_submodule(name)
    if kind == "prune":
        prune.random_unstructured(layer, "weight", amount=0.5)
    else:
        getattr(parametrizations, kind)(layer)
    network.eval()
    weight = layer.weight.detach().clone()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5)
    plain, grads = Network(), gradients(network, x)
    assert kind in ("spectral_norm", "orthogonal") or not torch.allclose(layer.weight, weight)
    state = {n: network.state_dict().get(n) for n in plain.state_dict()}
    state |= {
        f"{name}.weight": layer.weight.detach(),
        **({f"{name}.bias": layer.bias} if layer.bias is not None else {}),
    }
    plain.load_state_dict(state)
    assert_close(network(x), plain(x))
    mine = [grad for n, grad in grads.items() if n.startswith(f"{name}.") and ("weight" in n)]
    assert mine
    assert all(grad.any() for grad in mine)


def test_parametrised_projections(x):
    """The weight of three projections at once is no layer's, and is still read in each call."""
    layers = [module.nn.MultiheadAttention(8, 2) for module in (gattn, torch)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        parametrizations.weight_norm(layer, "in_proj_weight")
        with torch.no_grad():
            layer.parametrizations.in_proj_weight.original0.mul_(1.5)
    assert_close(*(layer(x, x, x) for layer in layers))


# Many models at once --------------------------------------------------------------------------------------------------


def ensemble():
    torch.manual_seed(0)
    return [Network() for _ in range(3)]


def test_func_ensembles(x):
    models = ensemble()
    parameters, buffers = torch.func.stack_module_state(models)

    def call(parameters, buffers):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    assert_close(torch.vmap(call)(parameters, buffers), torch.stack([model(x) for model in models]))
    grads = torch.vmap(torch.func.grad(lambda *state: call(*state).sin().sum()))(parameters, buffers)
    for place, model in enumerate(models):
        assert_close({name: grad[place] for name, grad in grads.items()}, gradients(model, x))


def test_tensordict_ensembles(x):
    tensordict = pytest.importorskip("tensordict")
    models = ensemble()
    expected = torch.stack([model(x) for model in models])
    parameters = tensordict.TensorDictParams.from_modules(*models, as_module=True)

    def call(parameters):
        with parameters.to_module(models[0]):
            return models[0](x)

    assert_close(torch.vmap(call)(parameters), expected)


# What models look at --------------------------------------------------------------------------------------------------


def test_captum_attributes_inputs(network, x):
    """Integrated gradients sum to the difference from the baseline, and are those of PyTorch's layer."""
    attr = pytest.importorskip("captum.attr")
    found = attr.IntegratedGradients(lambda x: network(x[0])[:1], multiply_by_inputs=True)
    attributions = found.attribute(x[None], target=1, n_steps=200, internal_batch_size=1)
    difference = (network(x) - network(torch.zeros_like(x)))[0, 1]
    assert_close(attributions.sum().float(), difference.detach(), rtol=0.05, atol=0.02)

    layers = [module.nn.TransformerEncoderLayer(8, 2, 16, 0.0) for module in (gattn, torch)]
    layers[1].load_state_dict(layers[0].state_dict())
    of_layers = [
        attr.Saliency(lambda x, layer=layer: layer(x)[0][None]).attribute(x.requires_grad_(), target=1)
        for layer in layers
    ]
    assert_close(*of_layers)


def test_captum_attributes_the_output_projection(x):
    """PyTorch's layer reads this projection's weight, so that captum finds nothing there; gattn's calls it."""
    attr = pytest.importorskip("captum.attr")
    attention = gattn.nn.MultiheadAttention(8, 2)
    found = attr.LayerActivation(lambda x: attention(x, x, x)[0], attention.out_proj).attribute(x)
    assert_close(found, attention(x, x, x)[0])
    theirs = nn.MultiheadAttention(8, 2)
    with pytest.raises(AssertionError, match="did not obtain"):
        attr.LayerActivation(lambda x: theirs(x, x, x)[0], theirs.out_proj).attribute(x)


def test_shap(network, x):
    """Expected gradients sum to the difference between the outputs of the input and of the background."""
    shap = pytest.importorskip("shap")

    class OfGraphs(nn.Module):
        def forward(self, x):
            return torch.stack([network(graph.view(NODES, 8))[0, :1] for graph in x])

    model, background = OfGraphs(), torch.zeros(1, NODES * 8)
    values = shap.GradientExplainer(model, background).shap_values(x.view(1, -1), nsamples=100, rseed=0)
    difference = (model(x.view(1, -1)) - model(background)).item()
    assert abs(values.sum() - difference) < 0.1 * abs(difference) + 0.02


def test_torchinfo(network, x):
    torchinfo = pytest.importorskip("torchinfo")
    found = torchinfo.summary(network, input_data=x, verbose=0)
    assert found.total_params == sum(parameter.numel() for parameter in network.parameters())
    shapes = {layer.var_name: layer.output_size for layer in found.summary_list}
    assert [shapes[name] for name in ("gat", "conv", "layer", "out")] == [[NODES, n] for n in (8, 8, 8, 3)]


@pytest.mark.parametrize("name", some({**LAYERS, **MODELS}))
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_torchviz_draws_every_layer(name):
    """A node for each parameter that the output depends on; what is saved is drawn, too."""
    torchviz = pytest.importorskip("torchviz")
    layer = made(name)
    outs = [
        out for out in tensors(row(name).call(layer, *row(name).inputs(Draw(requires_grad=True)))) if out.requires_grad
    ]
    given = dict(layer.named_parameters())
    if not (outs and given):
        return
    grads = torch.autograd.grad(outs[0].sum(), [*given.values()], allow_unused=True, retain_graph=True)
    drawn = torchviz.make_dot(outs[0], params=given, show_saved=True).source
    for parameter_name, grad in zip(given, grads, strict=True):
        assert grad is None or f"{parameter_name}\n" in drawn
