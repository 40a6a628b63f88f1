import os

import pytest
import torch

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
