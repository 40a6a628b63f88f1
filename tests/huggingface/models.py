"""Tiny random models of `transformers`, what is compared with its eager attention, and the table in the docs.

`python -m tests.huggingface.models` runs all of it, and writes `docs/huggingface_models.md`.
"""

import ast
import contextlib
import copy
import functools
import re
import sys
import textwrap
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
import transformers

from gattn.huggingface import function

TOKENS, TEXTS = 11, 3
EXPERTS = "mixture of experts"
NO_DROPOUT = (
    *("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop", "resid_pdrop"),
    *("embd_pdrop", "dropout", "dropout_rate", "activation_dropout", "hidden_dropout", "embed_dropout", "layerdrop"),
    *("embedding_dropout", "classifier_dropout", "feat_proj_dropout", "final_dropout", "resid_dropout"),
    *("encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "drop_path_rate", "mlp_dropout", "embed_pdrop"),
)
SIZES = {
    **dict.fromkeys(NO_DROPOUT, 0.0),
    **dict.fromkeys(("hidden_size", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads"), 4),
    **{"num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": 50, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sliding_window": 5},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"n_routed_experts": 4, "image_size": 16, "patch_size": 4, "initializer_range": 0.2, "init_std": 0.2},
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
SPEECH = {"conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}


@dataclass(frozen=True)
class Row:
    """An architecture: its kind decides the class, the inputs and the cells."""

    kind: str
    traits: str = ""
    config: dict = field(default_factory=dict, hash=False)


def each(names, row):
    return dict.fromkeys(names.split(), row)


ENCODERS = {
    **each("bert roberta distilbert albert electra camembert ernie esm layoutlm xlm-roberta", Row("encoder")),
    "eurobert": Row("encoder", "grouped heads, rotary"),
    "modernbert": Row("encoder", "sliding on both sides", {"local_attention": 6, "global_attn_every_n_layers": 2}),
}
DECODERS = {
    **each(
        "llama qwen2 qwen3 gemma phi phi3 olmo2 cohere stablelm granite smollm3 glm", Row("decoder", "grouped heads")
    ),
    **each("gpt2 gpt_neox opt gpt_bigcode biogpt", Row("decoder")),
    **each("mistral starcoder2 cohere2 gemma3_text olmo3 exaone4", Row("decoder", "sliding")),
    **each("mixtral qwen2_moe qwen3_moe olmoe phimoe", Row("decoder", EXPERTS)),
    "gptj": Row("decoder", "", {"rotary_dim": 4}),
    "gemma2": Row("decoder", "sliding, capped", {"attn_logit_softcapping": 2.0}),
    "gpt_oss": Row("decoder", f"sliding, sinks, {EXPERTS}"),
    "llama4_text": Row("decoder", f"chunked, {EXPERTS}", {"attention_chunk_size": 4, "intermediate_size_mlp": 48}),
    "deepseek_v2": Row("decoder", f"latent: values of another size, {EXPERTS}", {**LATENT, "n_shared_experts": 1}),
    "deepseek_v3": Row("decoder", f"latent: values of another size, {EXPERTS}", {**LATENT, "n_shared_experts": 1}),
}
PAIRS = {
    **each("t5 mt5 umt5 longt5", Row("pair", "relative buckets")),
    **each("bart mbart marian pegasus m2m_100 blenderbot", Row("pair")),
}
OTHERS = {
    **each("vit deit dinov2 ijepa", Row("image")),
    **each("clip_vision_model siglip_vision_model", Row("image")),
    "clip_text_model": Row("encoder", "causal", {"eos_token_id": 49}),
    "audio-spectrogram-transformer": Row("spectrogram", "", {"num_mel_bins": 16, "max_length": 32}),
    **each("wav2vec2 hubert", Row("sound", "", SPEECH)),
    "whisper": Row("listener", "", {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64}),
}
TABLE = ENCODERS | DECODERS | PAIRS | OTHERS
HAS_EXPERTS = hasattr(transformers.PreTrainedModel, "set_experts_implementation")
PADDED = ("encoder", "decoder", "pair")
CLASSES = {"decoder": "AutoModelForCausalLM", "pair": "AutoModelForSeq2SeqLM"}


@contextlib.contextmanager
def exact():
    """Models compute in float64 where they ask for float32."""
    is_old = transformers.__version__ < "5.2"  # whose buffers of frequencies become float64 with the model
    to, softmax, of_torch, as_float = torch.Tensor.to, F.softmax, torch.softmax, torch.Tensor.float

    def kept(x, *args, **kwargs):
        if x.dtype == torch.double and torch.float32 in (*args, *kwargs.values()):
            return x
        return to(x, *args, **kwargs)

    def of_double(function):
        def compute(x, *args, **kwargs):
            if x.dtype == torch.double:
                kwargs = {name: given for name, given in kwargs.items() if name != "dtype"}
            return function(x, *args, **kwargs)

        return compute

    with (
        mock.patch.object(torch.Tensor, "to", kept),
        mock.patch.object(
            torch.Tensor, "float", lambda x: x.double() if is_old or x.dtype == torch.double else as_float(x)
        ),
        mock.patch.object(F, "softmax", of_double(softmax)),
        mock.patch.object(torch, "softmax", of_double(of_torch)),
    ):
        yield


@functools.lru_cache(maxsize=4)
def models(name):
    """The model with eager attention, and the same with gattn's, in float64."""
    row = TABLE[name]
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **row.config})
    auto = getattr(transformers, CLASSES.get(row.kind, "AutoModel"))
    auto = transformers.WhisperForConditionalGeneration if name == "whisper" else auto
    made = []
    for implementation in ("eager", "gattn"):
        torch.manual_seed(0)
        make = getattr(auto, "from_config", None) or auto._from_config
        own = copy.deepcopy(config)
        own._experts_implementation = "eager"
        options = {"experts_implementation": "eager"} if HAS_EXPERTS else {}
        model = make(own, attn_implementation=implementation, **options)
        made.append(model.eval().double())
    made[1].load_state_dict(made[0].state_dict())
    return made


def inputs(name, padding=None):
    """What the models get, and which of their results count."""
    kind = TABLE[name].kind
    torch.manual_seed(1)
    text = torch.randint(3, 49, (TEXTS, TOKENS))
    real = torch.ones(TEXTS, TOKENS, dtype=torch.bool)
    for number, padded in enumerate((4, 2, 0)):
        if padding == "right":
            real[number, TOKENS - padded :] = False
        elif padding == "left":
            real[number, :padded] = False
    text = text.masked_fill(~real, 0)
    if kind == "image":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}, None
    if kind == "sound":
        return {"input_values": torch.randn(2, 90)}, None
    if kind == "spectrogram":
        return {"input_values": torch.randn(2, 32, 16)}, None
    given = {"input_ids": text} | ({} if padding is None else {"attention_mask": real.long()})
    if kind == "listener":
        return {"input_features": torch.randn(TEXTS, 8, 32), "decoder_input_ids": text}, None
    if kind == "pair":
        return given | {"decoder_input_ids": torch.randint(3, 49, (TEXTS, TOKENS))}, None
    return given, real


def in_type(given, dtype):
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}


def run(model, given, real, **options):
    """The results, of tokens that are there."""
    out = model(**in_type(given, next(model.parameters()).dtype), **options)
    found = out.logits if "logits" in out else out.last_hidden_state
    return out, found if real is None else found[real]


def results(model, given, real):
    """Output and gradients."""
    model.zero_grad()
    torch.manual_seed(2)
    found = run(model, given, real)[1]
    (found * torch.randn(found.shape, dtype=found.dtype)).sum().backward()
    return {"output": found.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_close(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, one in found.items():
        scale = max(float(expected[name].abs().max()), 1e-3)
        assert float((one - expected[name]).abs().max()) <= tolerance * scale, name


def compared(name, padding=None, change=lambda model: model):
    given, real = inputs(name, padding)
    attend = mock.patch.object(function, "attend", side_effect=function.attend)
    with exact(), attend as calls:
        expected, found = (results(change(model), given, real) for model in models(name))
    assert calls.called, "gattn computes nothing"
    assert_close(found, expected)


def generated(name, **options):
    given, _ = inputs(name, "left" if TABLE[name].kind == "decoder" else None)
    given = {key: x for key, x in given.items() if key != "decoder_input_ids"}
    with exact():
        expected, found = (
            model.generate(
                **in_type(given, torch.double), max_new_tokens=9, min_new_tokens=9, do_sample=False, **options
            )
            for model in models(name)
        )
    assert found.tolist() == expected.tolist()


def compiled(name):
    """Without breaks of the graph; transformers' default experts, which compile, are not made for float64."""
    given, real = inputs(name, "right" if TABLE[name].kind in PADDED else None)
    torch._dynamo.reset()
    model = copy.deepcopy(models(name)[1]).float()
    if EXPERTS in TABLE[name].traits and HAS_EXPERTS and name != "llama4_text":  # whose experts are matrices
        model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        expected = run(model, given, real)[1]
        found = run(torch.compile(model, fullgraph=True, backend="aot_eager"), given, real)[1]
    assert_close({"output": found}, {"output": expected}, 1e-4)


def checkpointed(name):
    def change(model):
        model = copy.deepcopy(model).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    compared(name, "right" if TABLE[name].kind in PADDED else None, change)


def bfloat16(name):
    """As near to eager attention in float64 as eager attention in bfloat16 is."""
    given, real = inputs(name, "right" if TABLE[name].kind in PADDED else None)
    with torch.no_grad():
        exactly = run(models(name)[0], given, real)[1]
        with torch.autocast("cpu", torch.bfloat16):
            theirs, ours = (run(copy.deepcopy(model).float(), given, real)[1].double() for model in models(name))
    assert float((ours - exactly).norm()) <= 1.5 * float((theirs - exactly).norm()) + 1e-6


def weights(name):
    given, real = inputs(name, "left" if TABLE[name].kind in PADDED else None)
    with torch.no_grad(), exact():
        theirs, ours = (run(model, given, real, output_attentions=True)[0] for model in models(name))
    kinds = [kind for kind in theirs if kind.endswith("attentions") and theirs[kind]]
    assert kinds
    for kind in kinds:
        for found, expected in zip(ours[kind], theirs[kind], strict=True):
            if given.get("attention_mask") is not None and kind in ("attentions", "encoder_attentions"):
                there = given["attention_mask"].bool()
                found, expected = found.transpose(1, 2)[there], expected.transpose(1, 2)[there]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


CHECKS = {
    "outputs, gradients": compared,
    "right padding": functools.partial(compared, padding="right"),
    "left padding": functools.partial(compared, padding="left"),
    "greedy": generated,
    "beams": functools.partial(generated, num_beams=3),
    "static cache": functools.partial(generated, cache_implementation="static", disable_compile=True),
    "compiled": compiled,
    "checkpointed": checkpointed,
    "bfloat16": bfloat16,
    "weights": weights,
}


def has(name, check):
    """Whether a cell has a meaning."""
    kind = TABLE[name].kind
    if "padding" in check:
        return kind in PADDED
    return kind in ("decoder", "pair", "listener") or check not in ("greedy", "beams", "static cache")


#: Cells of which transformers' own attention is not capable, and what else is left out, with the reason.
EXPLAINED = {
    ("longt5", "weights"): "its encoder has local attention of its own, whose weights have another shape",
    ("albert", "checkpointed"): "transformers has no gradient checkpointing for it",
}


#: Why layers of models do not ask the registry.
REASONS = {
    "table": 'look the implementation\'s name up in a table of their own, which lacks `"gattn"`: a `KeyError`. Load '
    "them with another one",
    "own": "have attention of their own (disentangled, by blocks of the text, with ALiBi or another formula) and keep "
    "it, whatever implementation is named; gattn warns of it where it is asked for a mask",
    "library": "come from timm, whose layers `transformers` does not change",
    "some": "run on gattn except for some layers of a kind of their own, such as deformable or block-sparse ones",
}
COMPUTES = r"[Ss]oftmax|scaled_dot_product|matmul|multi_head_attention|mra2_attention|cumulation|rwkv_linear"


def attention_of_its_own(text):
    """Whether a module defines layers that compute attention and do not ask the registry."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and "Attention" in node.name:
            code, bases = ast.unparse(node), " ".join(map(ast.unparse, node.bases))
            if "Module" in bases and re.search(COMPUTES, code) and "ALL_ATTENTION_FUNCTIONS" not in code:
                yield node.name


def without_registry():
    """The models of transformers of which layers do not ask the registry, by the reason."""
    found = {reason: [] for reason in REASONS}
    for path in sorted((Path(transformers.__file__).parent / "models").iterdir()):
        text = "\n".join(file.read_text() for file in sorted(path.glob("modeling_*.py")))
        own, asks = list(attention_of_its_own(text)), "ALL_ATTENTION_FUNCTIONS" in text
        if re.search(r"_ATTENTION_CLASSES\[", text):
            found["table"].append(path.name)
        elif path.name.startswith("timm_"):
            found["library"].append(path.name)
        elif own:
            found["some" if asks else "own"].append(path.name)
    return found


def cell(name, check):
    """What the table says."""
    if not has(name, check):
        return "–"
    if (name, check) in EXPLAINED:
        return "no"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS[check](name)
    except Exception as error:
        print(name, check, type(error).__name__, str(error)[:300].replace("\n", " "), file=sys.stderr)
        return "**wrong**"
    return "✓"


PAGE = Path(__file__).parents[2] / "docs" / "huggingface_models.md"
TEXT = """# Hugging Face models on gattn

`python -m tests.huggingface.models` makes this page with transformers {version}. Each model is a tiny random one in
float64, compared with itself under `eager` attention: outputs and gradients of all parameters to within 1e-9, the same
tokens from `generate`, weights to within 1e-9. Compiled means without a break of the graph, checkpointed with gradient
checkpointing; bfloat16 says that the error under autocast is that of `eager`, at most 1.5 times. Cells with "–" have no
meaning for the model, and "no" is explained below.

{table}

{explained}
## Models that do not use the registry

They are found in transformers' sources, by classes that are named after attention, compute it, and do not ask for the
registered function. Models without attention, and those that only combine others, are not named.

{others}"""


def write(cells):
    """The page, from the cells of each model."""
    header = ["model", "traits", *CHECKS]
    rows = [header, ["---"] * len(header), *([name, TABLE[name].traits, *row] for name, row in cells.items())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reasons = "".join(f"- {name}, {check}: {reason}.\n" for (name, check), reason in EXPLAINED.items())
    others = "".join(
        textwrap.fill(
            f"- These {REASONS[reason]}: {', '.join(names)}.", 125, subsequent_indent="  ", break_on_hyphens=False
        )
        + "\n"
        for reason, names in without_registry().items()
    )
    PAGE.write_text(TEXT.format(version=transformers.__version__, table=table, explained=reasons, others=others))


def main():
    """Runs the cells of the named models or checks; all of them make the page."""
    transformers.logging.set_verbosity_error()
    names = [name for name in sys.argv[1:] if name in TABLE] or list(TABLE)
    checks = [check for check in sys.argv[1:] if check in CHECKS] or list(CHECKS)
    cells = {}
    for name in names:
        cells[name] = [cell(name, check) for check in checks]
        print(name, *cells[name], flush=True)
    if (names, checks) == (list(TABLE), list(CHECKS)):
        write(cells)


if __name__ == "__main__":
    main()
