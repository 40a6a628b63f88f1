"""The explorer: what it takes, what it writes, and what becomes of clicks and keys in a browser."""

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gattn
from gattn.testing import random_edge_index
from gattn.visualize import explore
from gattn.visualize.explorer import build, encoding

HOSTILE = "<script>alert(1)</script>"


def stored(exploration):
    """The data of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', exploration.html)[1])


def unpacked(text, dtype):
    return np.frombuffer(base64.b64decode(text), f"<{dtype}")


def edges_of(graph):
    return torch.tensor(
        np.stack([unpacked(graph[end]["base64"], graph[end]["type"]) for end in ("source", "target")]).astype(int)
    )


def weights_of(layer, num_edges):
    return torch.tensor(
        unpacked(layer["base64"], "u2").astype(float).reshape(layer["heads"], num_edges).T * layer["step"]
    )


@pytest.fixture
def graph():
    """A graph of 12 nodes, and the records of two layers on it, of three heads and of one."""
    edge_index = random_edge_index(12, num_edges=40)
    model = gattn.models.GAT(5, 6, num_layers=2, out_channels=3, heads=3)
    x = torch.randn(12, 5) * 3
    with gattn.record_attention(model.eval()) as records:
        model(x, edge_index)
    return model, (x, edge_index), records


class TestEncoding:
    def test_weights_come_back(self):
        weights = torch.rand(50, 3, dtype=torch.double)
        kept = encoding.quantised(weights)
        values = unpacked(kept["base64"], "u2").reshape(3, 50).T * kept["step"]
        assert np.abs(values - weights.numpy()).max() <= 0.5 * float(weights.max()) / 65535 * 1.001
        assert values.max() == pytest.approx(float(weights.max()), rel=1e-12)

    def test_weights_of_zero(self):
        assert set(unpacked(encoding.quantised(torch.zeros(4, 1))["base64"], "u2")) == {0}

    @pytest.mark.parametrize(("largest", "dtype"), [(65535, "u2"), (65536, "u4")])
    def test_indices_take_the_bits_that_they_need(self, largest, dtype):
        kept = encoding.packed_indices([0, largest])
        assert kept["type"] == dtype
        assert unpacked(kept["base64"], dtype).tolist() == [0, largest]

    @pytest.mark.parametrize("text", [HOSTILE, "<!--<script>", "]]>", "\u2028\u2029", "&lt;", "\ud800", "日本"])
    def test_text_cannot_leave_its_element(self, text):
        written = encoding.json_in_html([text])
        assert not set("<>&\u2028\u2029") & set(written)
        assert json.loads(written) == [text]


class TestInput:
    def check(self, exploration, records):
        data = stored(exploration)
        flat = [record for calls in records.values() for record in calls]
        assert [layer["heads"] for layer in data["layers"]] == [record.weights.size(1) for record in flat]
        for layer, record in zip(data["layers"], flat, strict=True):
            edges = edges_of(data["graphs"][layer["graph"]])
            assert edges.equal(record.edge_index)
            torch.testing.assert_close(weights_of(layer, edges.size(1)), record.weights.double(), atol=1e-5, rtol=0)

    def test_a_model_and_its_inputs(self, graph):
        model, inputs, records = graph
        model.train()
        model.convs[0].eval()
        exploration = explore(model, *inputs, path=None)
        assert (model.training, model.convs[0].training, model.convs[1].training) == (True, False, True)
        self.check(exploration, records)
        assert len(stored(exploration)["graphs"]) == 1  # both layers share it

    def test_a_model_of_transformers_its_tokenizer_and_a_text(self):
        transformers = pytest.importorskip("transformers")
        tokenizers = pytest.importorskip("tokenizers")
        import gattn.huggingface

        words = ["[UNK]", "the", "man", "walked", "dog"]
        split = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(5), strict=True)), "[UNK]"))
        split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=split, unk_token="[UNK]")
        config = transformers.BertConfig(
            vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
        )
        model, text = transformers.BertModel(config), "the man walked the dog"
        with pytest.raises(ValueError, match=r'call model.set_attn_implementation\("gattn"\) first'):
            explore(model, tokenizer, text, path=None)
        model.set_attn_implementation("gattn")
        data = stored(explore(model, tokenizer, text, path=None))
        assert data["spaces"][0]["names"] == text.split()
        assert data["spaces"][0]["sequence"]
        with gattn.record_attention(model.eval()) as records, torch.no_grad():
            model(torch.tensor([[1, 2, 3, 1, 4]]))
        assert [layer["heads"] for layer in data["layers"]] == [2, 2]
        for layer, ((weights, _),) in zip(data["layers"], records.values(), strict=True):
            expected = weights[0].permute(1, 2, 0).reshape(25, 2).double()
            torch.testing.assert_close(weights_of(layer, 25), expected, atol=1e-5, rtol=0)
        with gattn.huggingface.graph(gattn.CompleteGraph(5, window=1)):
            near = stored(explore(model, tokenizer, text, path=None, tokens=list("abcde")))
        assert edges_of(near["graphs"][0]).size(1) == 13
        assert near["spaces"][0]["names"] == list("abcde")

    def test_records_of_a_model_and_of_a_layer(self, graph):
        records = graph[2]
        self.check(explore(records, path=None), records)
        calls = records["convs.1"]
        for given in (calls, calls[0], {"convs.1": calls}):
            self.check(explore(given, path=None), {"convs.1": calls})

    def test_edge_index_and_weights(self, graph):
        record = graph[2]["convs.0"][0]
        pair = (record.edge_index, record.weights)
        for exploration in (explore(*pair, path=None), explore(pair, path=None), explore({"first": pair}, path=None)):
            self.check(exploration, {"": [record]})

    def test_matrices(self):
        matrices = torch.rand(2, 3, 4).tril()
        data = stored(explore(matrices, path=None))
        (space,), (graph,) = data["spaces"], data["graphs"]
        assert (space["sources"], space["targets"], space["shared"], space["sequence"]) == (4, 3, False, True)
        source, target = edges_of(graph)
        dense = torch.zeros(2, 3, 4, dtype=torch.double)
        dense[:, target - 4, source] = weights_of(data["layers"][0], len(source)).T
        torch.testing.assert_close(dense, matrices.double(), atol=1e-5, rtol=0)
        assert len(source) == 6  # what is behind the mask is no edge

    def test_an_element_of_a_padded_batch(self):
        model = gattn.models.TransformerSeq2Seq(9, 9, 8, 1, 2).eval()
        with gattn.record_attention(model) as records:
            model(torch.randint(3, 9, (2, 5)), torch.randint(3, 9, (2, 4)), torch.tensor([5, 3]))
        exploration = explore(records, tokens=(["a", "b", "c"], list("wxyz")), element=1, path=None)
        data = stored(exploration)
        assert data["batch"] == {"element": 1, "size": 2}
        assert [space["names"] for space in data["spaces"]] == [list("abc"), list("wxyz"), list("abcwxyz")]
        cross = data["layers"][2]
        kept = weights_of(cross, 12).T.reshape(2, 4, 3)
        record = records["decoder.layers.0.multihead_attn"][0]
        torch.testing.assert_close(kept, record.weights[1, :, :, :3].double(), atol=1e-5, rtol=0)

    def test_a_block_of_a_packed_graph(self):
        layer = gattn.nn.MultiheadAttention(8, 2)
        x = torch.randn(5, 8)
        with gattn.record_attention(layer) as records:
            layer(x, x, x, graph=gattn.CompleteGraph.packed([2, 3]))
        data = stored(explore(records, tokens=list("abc"), element=1, path=None))
        assert data["spaces"][0]["names"] == list("abc")
        torch.testing.assert_close(
            weights_of(data["layers"][0], 9).T.reshape(2, 3, 3), records[""][0].weights[1].double(), atol=1e-5, rtol=0
        )

    def test_decoding_token_by_token_is_one_matrix(self):
        model = gattn.models.TransformerLM(9, 8, 1, 2).eval()
        with gattn.record_attention(model) as records:
            model.generate(torch.zeros(1, 3, dtype=torch.int64), num_new_tokens=3)
        data = stored(explore(records, path=None))
        assert len(data["layers"]) == 1
        assert (data["spaces"][0]["sources"], data["spaces"][0]["targets"]) == (5, 5)
        assert edges_of(data["graphs"][0]).size(1) == 15  # a causal triangle

    def test_names_classes_and_positions(self, graph):
        names = [f"node {i}" for i in range(12)]
        pos = {i: (float(i), -1.0) for i in range(12)}
        edges = {(int(a), int(b)): f"{a}-{b}" for a, b in graph[1][1].t().tolist()}
        data = stored(
            explore(graph[2], labels=names, classes=torch.arange(12) % 3, pos=pos, edge_labels=edges, node=7, path=None)
        )
        (space,) = data["spaces"]
        assert space["names"] == names
        assert data["classes"] == ["class 0", "class 1", "class 2"]
        assert unpacked(space["classes"], "u2").tolist() == [0, 1, 2] * 4
        assert unpacked(space["pos"], "f4").tolist() == [x for i in range(12) for x in (i, -1)]
        assert space["start"] == 7
        kept = data["graphs"][0]["names"]
        words = [kept["words"][i] for i in unpacked(kept["index"]["base64"], kept["index"]["type"])]
        assert words == [edges.get(edge, "") for edge in map(tuple, edges_of(data["graphs"][0]).t().tolist())]

    def test_what_reaches_one_node(self):
        edge_index = torch.tensor([[0, 1, 2, 3, 5], [1, 2, 3, 4, 4]])
        weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.6])
        data = stored(explore(edge_index, weights, node=4, hops=2, path=None))
        (space,) = data["spaces"]
        assert space["names"] == ["2", "3", "4", "5"]
        assert space["start"] == 2
        assert edges_of(data["graphs"][0]).tolist() == [[0, 1, 3], [1, 2, 2]]
        torch.testing.assert_close(weights_of(data["layers"][0], 3)[:, 0], weights[2:].double(), atol=1e-5, rtol=0)

    def test_nodes_of_several_types(self):
        writes, cites, reviews = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("author", "on", "paper")
        edges = {writes: [[0, 1], [2, 0]], cites: [[0, 1, 2], [1, 2, 2]], reviews: [[1], [2]]}
        edges = {name: torch.tensor(edge_index) for name, edge_index in edges.items()}
        x = {"paper": torch.randn(3, 4), "author": torch.randn(2, 4)}
        model = gattn.nn.HGTConv(4, 4, (["paper", "author"], list(edges)), heads=2).eval()
        with gattn.record_attention(model) as records:
            model(x, edges)
        data = stored(explore(model, x, edges, path=None))
        (space,), (graph,) = data["spaces"], data["graphs"]
        assert space["names"] == ["paper 0", "paper 1", "paper 2", "author 0", "author 1"]
        assert (data["classes"], space["shared"]) == (["paper", "author"], True)
        assert unpacked(space["classes"], "u2").tolist() == [0, 0, 0, 1, 1]
        assert edges_of(graph).tolist() == [[3, 4, 0, 1, 2, 4], [2, 0, 1, 2, 2, 2]]
        words = [graph["names"]["words"][i] for i in unpacked(graph["names"]["index"]["base64"], "u2")]
        assert words == ["writes"] * 2 + ["cites"] * 3 + ["on"]
        torch.testing.assert_close(weights_of(data["layers"][0], 6), records[""][0].weights.double(), atol=1e-5, rtol=0)
        assert not model._forward_hooks

    def test_a_layer_for_each_type_of_edges(self):
        weights = torch.full((3, 1), 0.5)
        graph = gattn.SparseGraph(torch.tensor([[0, 1, 1], [0, 0, 1]]), 2, 2)
        record = gattn.recording.AttentionRecord(weights, graph)
        names = [f"convs.<{source}___to___{target}>" for source, target in ("ab", "bb", "ba")]
        data = stored(explore({name: [record] for name in names}, path=None))
        assert [(space["shared"], space["names"]) for space in data["spaces"]] == [
            (False, ["a 0", "a 1", "b 0", "b 1"]),  # sources and targets are other nodes, although as many
            (True, ["b 0", "b 1"]),
            (False, ["b 0", "b 1", "a 0", "a 1"]),
        ]
        assert data["classes"] == ["a", "b"]
        assert unpacked(data["spaces"][2]["classes"], "u2").tolist() == [1, 1, 0, 0]

    def test_the_first_node_has_uneven_weights(self):
        edge_index = torch.tensor([[0, 1, 2, 3] * 2, [4] * 4 + [5] * 4])
        weights = torch.tensor([0.25] * 4 + [0.7, 0.1, 0.1, 0.1])
        assert stored(explore(edge_index, weights, path=None))["spaces"][0]["start"] == 5


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            ((3,), {}, TypeError, "explore takes a model and its inputs"),
            (({},), {}, ValueError, "there is no layer that attended"),
            ((nn.Linear(2, 2), torch.ones(1, 2)), {}, ValueError, "it has no attention layer"),
            ((nn.Linear(2, 2),), {}, ValueError, "needs the model's inputs"),
            ((torch.ones(3, 3),), {"element": 1}, ValueError, "no batch dimension"),
            ((torch.ones(2, 1, 3, 3),), {"element": 2}, IndexError, "there is no element 2"),
            (
                (torch.ones(3, 3),),
                {"tokens": ["a"]},
                ValueError,
                "tokens must have one entry for each of the 3 nodes; got 1",
            ),
            ((torch.ones(3, 3),), {"labels": "abc", "tokens": "abc"}, ValueError, "labels and tokens both"),
            ((torch.ones(3, 3),), {"classes": [1]}, ValueError, "classes must have one entry"),
            ((torch.ones(3, 3),), {"pos": [[0.0, 0.0]]}, ValueError, "pos must have one entry"),
            ((torch.ones(3, 3),), {"pos": [[0.0]] * 3}, ValueError, r"pos is \[N, 2\]"),
            ((torch.ones(3, 3),), {"edge_labels": ["a"]}, ValueError, "one entry for each of the 9 edges"),
            ((torch.ones(3, 3),), {"node": 3}, IndexError, "there is no node 3"),
            ((torch.ones(3, 3),), {"hops": 1}, ValueError, "say of which one"),
            ((-torch.ones(3, 3),), {}, ValueError, "not negative"),
            ((torch.ones(3, 3),), {"node": 1.5}, TypeError, "node must be an integer; got 1.5"),
            ((torch.ones(3, 3),), {"element": "a"}, TypeError, "element must be an integer; got 'a'"),
            ((torch.ones(3, 3),), {"node": 1, "hops": 1.5}, TypeError, "hops must be an integer; got 1.5"),
            ((torch.ones(3, 3),), {"classes": torch.eye(3)}, ValueError, "classes must be one text or number per node"),
            ((torch.ones(3, 3, dtype=torch.complex64),), {}, ValueError, "must be real numbers; got torch.complex64"),
            ((torch.ones(1, 2), 3, 4), {}, TypeError, "inputs for a model only"),
            ((torch.ones(2, 4), torch.ones(4, 1)), {}, TypeError, "integers .* or another graph; got torch.float32"),
            (("abc", torch.ones(4, 1)), {}, TypeError, "integers .* or another graph; got str"),
            (([torch.ones(2, 2)] * 2,), {"tokens": (["a", "b"], ["c", "d"])}, ValueError, "one layer at a time"),
        ],
    )
    def test_what_is_wrong_is_said(self, arguments, options, error, message):
        with pytest.raises(error, match=message):
            explore(*arguments, path=None, **options)

    def test_arrays_of_numpy_are_edges_too(self):
        edge_index, weights = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0.5, 0.25, 1.0])
        expected = explore(edge_index, weights, path=None).html
        assert explore(edge_index.numpy(), weights.numpy(), path=None).html == expected
        assert explore((edge_index.numpy(), weights.numpy()), path=None).html == expected

    def test_too_large(self, monkeypatch):
        monkeypatch.setattr("gattn.visualize.explorer.content._MAX_NUMBERS", 10)
        with pytest.raises(ValueError, match=r"27 weights and edges are too many .* at most 10"):
            explore(torch.ones(3, 3), path=None)


class TestPage:
    def test_written_and_shown_in_notebooks(self, tmp_path):
        path = tmp_path / "page.html"
        exploration = explore(torch.ones(2, 2), path=path, title=HOSTILE)
        assert exploration.path == path
        assert path.read_text(encoding="utf-8") == exploration.html
        frame = exploration._repr_html_()
        assert frame.count("<") == 2  # the frame alone: its page is quoted
        assert 'sandbox="allow-scripts allow-downloads"' in frame  # pictures are saved as downloads
        assert explore(torch.ones(2, 2), path=None).path is None
        assert "<title>7</title>" in explore(torch.ones(2, 2), path=None, title=7).html

    def test_says_which_file_it_wrote(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        explore(torch.ones(2, 2))
        assert capsys.readouterr().out == f"wrote {tmp_path / 'attention.html'}\n"
        explore(torch.ones(2, 2), path=None).save("other.html")
        assert not capsys.readouterr().out

    def test_only_its_own_scripts_may_run(self):
        html = explore(torch.ones(2, 2), path=None).html
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for kind, pattern in (("script-src", r"<script>(.*?)</script>"), ("style-src", r"<style>(.*?)</style>")):
            hashes = [
                base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
                for text in re.findall(pattern, html, re.DOTALL)
            ]
            assert re.search(rf"{kind} ([^;]*)", policy)[1].split() == [f"'sha256-{code}'" for code in hashes]
        assert not re.search(r'(src|href)="', html)

    def test_libraries_are_those_of_their_packages(self):
        folder = Path(build.__file__).parent / "page" / "d3"
        sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
        assert (
            set(sums)
            == {path.name for path in folder.glob("*.js")}
            == {f"d3-{name}.min.js" for name in build._LIBRARIES}
        )
        for name, expected in sums.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
        assert (folder / "LICENSE").read_text() in explore(torch.ones(1, 1), path=None).html

    def test_cora_takes_less_than_five_megabytes(self, load):
        data = load("Cora")
        model = gattn.models.GAT(data.num_features, 64, 2, 7, heads=8, out_heads=8)
        exploration = explore(model, data.x, data.edge_index, classes=data.y, path=None)
        assert len(exploration.html.encode()) < 1.5e6  # 5 MB are allowed
