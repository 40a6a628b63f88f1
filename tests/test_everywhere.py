"""What holds for every public layer and model: tests over the table of `tests.layers`."""

import gattn
from tests.layers import LAYERS, MODELS, NO_LAYERS


def test_every_public_layer_and_model_is_in_the_table():
    public = {*gattn.nn.__all__, *gattn.models.__all__}
    assert {name.split(" ")[0] for name in LAYERS | MODELS} == public - NO_LAYERS.keys()
