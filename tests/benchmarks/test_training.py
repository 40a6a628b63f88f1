import pytest

from benchmarks.framework.results import ResultsFile
from benchmarks.training import Train


@pytest.mark.slow
def test_a_run_killed_half_way_goes_on_to_the_same_losses(tmp_path, kill, one_process):
    arguments = ["--tasks", "typed", "--layers", "gattn", "--epochs", "12"]
    assert 0 < kill("training", arguments, tmp_path / "killed") < 12
    for out in ("killed", "whole"):
        Train.main([*arguments, "--out", str(tmp_path / out)])
    killed, whole = (ResultsFile(tmp_path / out / "runs.jsonl").rows()[0]["losses"] for out in ("killed", "whole"))
    assert killed == whole
    assert len(whole) == 12
    assert whole[-1] < whole[0]
