"""The features that GRIT makes of pairs, by the CPU kernels and by plain PyTorch."""

import pytest
import torch

import gattn
from gattn.ops.pair_roots import pair_roots
from gattn.testing import random_edge_index

N, H = 6, 2


class TestPairRoots:
    def inputs(self, dtype=torch.double, sources=7, pairs=20):
        torch.manual_seed(0)
        given = [torch.randn(size, H, 5, dtype=dtype) for size in (N, sources, pairs, pairs)]
        given[2][0] = 0.0  # where roots are steep
        edges = random_edge_index(sources, N, pairs)
        return [x.requires_grad_() for x in given], edges[1], edges[0]

    @staticmethod
    def plain(*args):
        with gattn.backend("reference"):
            return pair_roots(*args)

    @pytest.mark.parametrize("dtype", [torch.float, torch.double])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_kernels_compute_the_formula(self, dtype, threads, monkeypatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        given, target, source = self.inputs(dtype, pairs=4000)
        results = []
        for function in (pair_roots, self.plain):
            out = function(*given, target, source)
            results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), given)])
        assert "_Kernel" in str(pair_roots(*given, target, source).grad_fn)
        torch.testing.assert_close(*results)
        (_, *grads), last = results[0], results[0][3]
        assert not last[0].any()
        assert all(grad.isfinite().all() for grad in grads)

    def test_second_derivatives(self):
        given, target, source = self.inputs()
        given[2] = (given[2] + 3).detach().requires_grad_()
        given[0] = (given[0].detach() * 0.1 + 2).requires_grad_()
        given[1] = (given[1].detach() * 0.1 + 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda *x: pair_roots(*x, target, source), given)
        assert torch.autograd.gradgradcheck(lambda *x: pair_roots(*x, target, source), given)

    def test_other_inputs(self):
        given, target, source = self.inputs()
        expected = self.plain(*given, target, source)
        twice = [torch.stack([x, x]) for x in given]
        torch.testing.assert_close(pair_roots(*twice, target, source)[1], expected)
        halves = pair_roots(*(x.bfloat16() for x in given), target, source)
        torch.testing.assert_close(halves.double(), expected, rtol=0.1, atol=0.1)
        strided = [x.repeat_interleave(2, 0)[::2] for x in given]
        torch.testing.assert_close(pair_roots(*strided, target, source), expected)
        assert pair_roots(*given[:2], *(x[:0] for x in given[2:]), target[:0], source[:0]).shape == (0, H, 5)
        given[0].data[0, 0, 0] = torch.nan
        assert pair_roots(*given, target, source)[target == 0].isnan().any()
        with pytest.raises(ValueError, match="out of range"):
            pair_roots(*given, target + N, source)

    def test_batches_of_gradients(self):
        given, target, source = self.inputs(pairs=4)
        out = pair_roots(*given, target, source)
        basis = torch.eye(out.numel(), dtype=torch.double).view(-1, *out.shape)
        found = torch.autograd.grad(out, given, basis, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(out, given, row, retain_graph=True) for row in basis]
        torch.testing.assert_close(found, tuple(torch.stack(rows) for rows in zip(*one_by_one, strict=True)))
