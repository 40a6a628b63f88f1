import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which PyG does

import gattn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def load():
    """Loads real data; where they are missing, the test fails in CI and is skipped elsewhere."""

    def load(name, **kwargs):
        try:
            return gattn.datasets.load(name, **kwargs)
        except gattn.datasets.DatasetUnavailableError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))

    return load
