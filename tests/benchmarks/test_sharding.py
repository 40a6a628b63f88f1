"""The benchmark of sharded graphs."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from benchmarks import scale, sharding

SMALL = {"power law": scale.sized("power law", 4), "mesh": scale.Graph("mesh", 20**2, 9 * 20**2, "mesh")}


@pytest.mark.slow
def test_processes_agree_with_float64(tmp_path):
    """Two processes give the reference's logits and gradients, and what they send is reported; else it is wrong."""
    case = sharding.Case(SMALL["power law"], "step", "gattn", 1, 3, 0.1, "kept", 8, "blocks", 2)
    reference = tmp_path / "reference.pt"
    references = case.references()
    torch.save(references, reference)
    row = case.measure(reference)
    assert row["outcome"] == "ok"
    assert len(row["sent_bytes"]) == len(row["peaks"]) == 2
    # Forward and backward, two layers: the key's 4 numbers per row and the value's 128.
    assert sum(row["sent_bytes"]) == 2 * 2 * 4 * (4 + 128) * sum(row["fetched_rows"])
    references[""]["gradient of 1.bias"]["exact"] += 1
    torch.save(references, reference)
    assert case.measure(reference)["outcome"] == "WRONG"


def test_a_missing_package_is_named_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="error: METIS needs its package: pip install pymetis"):
        sharding.Sharding.main(["--out", str(tmp_path)])
    for arguments in (["--partitions", "blocks"], ["--processes", "1"]):
        options = sharding.Sharding.parse([*arguments, "--out", str(tmp_path)])
        assert sharding.Sharding(options, None, None).cases()


def test_report():
    """Each process count is compared with one process."""
    case = sharding.Case(SMALL["mesh"], "step", "gattn", 1, 3, 0.1, "kept", 8, "blocks", 1)
    step = {"median": 0.2, "q1": 0.1, "q3": 0.3, "times": [0.2]}
    row = {"outcome": "ok", "step": step, "sent_bytes": [0], "fetched_rows": [0]}
    row |= {"processor_seconds": [0.2], "edges": [100], "peaks": [1000]}
    two = row | {"sent_bytes": [10, 10], "fetched_rows": [40, 60], "edges": [60, 40], "peaks": [500, 600]}
    other = replace(case, processes=2)
    line = sharding.line_of(other, two | {"processor_seconds": [0.1, 0.1]}, {case: row, other: two})
    assert line["edges"] == "60 (0.60)"
    assert line["processor, ms"] == "100 (0.50)"
    assert line["fetched"] == "60 (0.30 per row owned)"
