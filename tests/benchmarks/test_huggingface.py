"""The benchmark of whole models of transformers."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AttentionInterface

from benchmarks import huggingface
from benchmarks.framework import measuring
from benchmarks.framework.measuring import check, wrong
from gattn.huggingface import attention

QUICK = ["--allocator", "default", "--threads", "1", "--repeats", "2", "--seconds", "0.02"]


@pytest.fixture
def small(monkeypatch, one_process):
    """One layer and short texts, and no memory is measured."""
    monkeypatch.setattr(measuring, "peak_above", lambda function, device: (function(), 10**6))
    for name, task in huggingface.TASKS.items():
        fewer = {"num_layers" if task.model_type == "t5" else "num_hidden_layers": 1, "vocab_size": 30}
        texts = tuple(max(text // 32, 2) for text in task.texts[-3:])
        config = {**task.config, **fewer, **({"sliding_window": 8} if "sliding_window" in task.config else {})}
        short = task._replace(config=config, texts=texts, new_tokens=min(task.new_tokens, 3), exact="eager")
        monkeypatch.setitem(huggingface.TASKS, name, short)


@pytest.mark.filterwarnings("ignore")
def test_every_model_is_measured_and_agrees_with_float64(tmp_path, small):
    peers = ["gattn", "sdpa", "eager"]
    huggingface.HuggingFace.main([*QUICK, "--peers", *peers, "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    expected = [(name, peer) for name, task in huggingface.TASKS.items() for peer in peers if peer in task.peers]
    assert [(row["task"], row["peer"]) for row in rows] == expected
    assert {row["outcome"] for row in rows} == {"ok"}
    for row in rows:
        assert ("step" in row) == ("new tokens" not in row["task"])
        names = {name.partition(" of ")[0] for name in row["errors"]}
        assert names == {"output", "output without autograd"} | ({"gradient"} if "step" in row else set())
    table = (tmp_path / "table.md").read_text()
    assert "step, × gattn" in table
    assert "nan" not in table


def case(name, peer="gattn"):
    (name,) = (task for task in huggingface.TASKS if name in task)
    return huggingface.Case(name, peer, 1, 2, 0.1, "default", "5")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "forgotten"), [
    ("4 096", "window"), ("caps", "softcap"), ("sinks", "s_aux"), ("buckets", "position_bias"), ("32 to 512", "mask"),
    ("with weights", "weights"),
])  # fmt: skip
def test_what_is_forgotten_is_found(name, forgotten, small, monkeypatch):
    measured = case(name)

    def wrongly(module, query, key, value, mask, **given):
        if forgotten == "weights":
            out, weights = attention(module, query, key, value, mask, **given)
            return out, 0.99 * weights
        if forgotten in ("window", "mask"):
            mask, given["sliding_window"], given["is_causal"] = None, None, forgotten == "window"
        return attention(module, query, key, value, mask, **{**given, forgotten: None})

    expected = measured.references()[huggingface.FORWARD]
    registry = AttentionInterface._global_mapping
    monkeypatch.setitem(registry, "gattn", wrongly)
    computation = measured.computation()
    out = computation.unpack(computation.forward())
    assert wrong(check({"output": out, "output without autograd": out}, expected))


def test_a_step_trains_with_dropout(small):
    measured = case("dropout")
    computation = measured.computation()
    before = computation.forward()
    measured.__dict__["step"]()
    assert not torch.equal(computation.forward(), computation.forward()), "dropout is on"
    assert not torch.equal(before, computation.forward())


def test_flex_is_measured_with_memory_kept():
    options = huggingface.HuggingFace.parse([])
    cases = huggingface.HuggingFace(options, None, None).cases()
    assert {case.allocator for case in cases if case.peer == "flex"} == {"kept"}
    assert {case.peer for case in cases} == set(huggingface.PEERS)
    assert not [case for case in cases if case.allocator == "default" and "16 384" in case.task]
