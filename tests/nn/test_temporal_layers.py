"""Encodings of time, and the attention of temporal graph networks, beside PyG's."""

import pytest
import torch
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.encoding import TemporalEncoding
from torch_geometric.nn.models.tgn import TimeEncoder

from gattn import nn
from gattn.testing import random_edge_index


class TestTemporalEncoding:
    @pytest.mark.parametrize("channels", [1, 5, 16])
    def test_as_pyg(self, channels):
        ours, theirs = nn.TemporalEncoding(channels), TemporalEncoding(channels)
        assert str(ours) == str(theirs)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=0)
        times = torch.rand(2, 3)
        torch.testing.assert_close(ours(times), theirs(times))
        times = times.double().requires_grad_()
        assert torch.autograd.gradcheck(ours, times)

    def test_large_times(self):
        encoding, times = nn.TemporalEncoding(4), torch.tensor([1.0e9, 1.0e9 + 64])
        exact = (times.double().view(-1, 1) * encoding.weight.double()).cos()
        torch.testing.assert_close(encoding(times).double(), exact, rtol=0, atol=1e-6)
        torch.testing.assert_close(encoding(times.long()), encoding(times))
        with pytest.raises(TypeError, match="tensor of times"):
            encoding(3.0)


class Embedding(torch.nn.Module):
    """The module of PyG's example."""

    def __init__(self, in_channels, out_channels, msg_dim, time_enc):
        super().__init__()
        self.time_enc = time_enc
        edge_dim = msg_dim + time_enc.out_channels
        self.conv = TransformerConv(in_channels, out_channels // 2, heads=2, dropout=0.1, edge_dim=edge_dim)

    def forward(self, x, last_update, edge_index, t, msg):
        encoded = self.time_enc((last_update[edge_index[0]] - t).to(x.dtype))
        return self.conv(x, edge_index, torch.cat([encoded, msg], dim=-1))


class TestGraphAttentionEmbedding:
    def inputs(self):
        edges = random_edge_index(6, num_edges=12)
        x, msg = (torch.randn(size, dtype=torch.double, requires_grad=True) for size in ((6, 5), (edges.size(1), 3)))
        return x, torch.randint(50, 100, (6,)), edges, torch.randint(0, 50, (edges.size(1),)), msg

    def test_as_pyg(self):
        ours, theirs = (cls(5, 8, 3, TimeEncoder(4)).double().eval() for cls in (nn.GraphAttentionEmbedding, Embedding))
        ours.load_state_dict(theirs.state_dict())
        inputs, results = self.inputs(), []
        for module in (ours, theirs):
            out = module(*inputs)
            results.append([out, *torch.autograd.grad(out.sin().sum(), [inputs[0], inputs[4], *module.parameters()])])
        torch.testing.assert_close(*results)
        ours.reset_parameters()
        assert not torch.allclose(ours(*inputs), results[0][0])

    def test_large_times_in_half_precision(self):
        x, _, edges, _, msg = self.inputs()
        module = nn.GraphAttentionEmbedding(5, 8, 3, nn.TemporalEncoding(4)).double().eval()
        last_update, t = torch.randint(10**6, (6,)), torch.randint(200, (edges.size(1),)).byte()
        expected = module(x, last_update, edges, t.long(), msg)
        torch.testing.assert_close(module(x, last_update, edges, t, msg), expected)
        for dtype in (torch.half, torch.bfloat16):
            out = module.to(dtype)(x.to(dtype), last_update, edges, t, msg.to(dtype))
            assert out.isfinite().all()  # the largest number in half precision is 65 504

    def test_compiled(self):
        module, inputs = nn.GraphAttentionEmbedding(5, 8, 3, nn.TemporalEncoding(4)).double().eval(), self.inputs()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), module(*inputs))

    def test_wrong_inputs(self):
        x, last_update, edges, t, msg = self.inputs()
        module = nn.GraphAttentionEmbedding(5, 8, 3, TimeEncoder(4)).double()
        with pytest.raises(ValueError, match="one time per node, t one and msg one row per event"):
            module(x, last_update[1:], edges, t, msg)
        with pytest.raises(TypeError, match="t must be a tensor"):
            module(x, last_update, edges, 5, msg)
        with pytest.raises(ValueError, match="multiple of heads"):
            nn.GraphAttentionEmbedding(5, 7, 3, TimeEncoder(4))
        with pytest.raises(TypeError, match="Linear has None"):
            nn.GraphAttentionEmbedding(5, 8, 3, torch.nn.Linear(1, 4))
