"""The list of mutations cannot rot in silence: each one's text is in the code exactly once."""

import pytest

from tests import mutations


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_text_is_there(mutation):
    try:
        mutation.place()
    except SystemExit as error:
        pytest.fail(str(error))


def test_each_file_has_tests():
    assert {mutation.file for mutation in mutations.MUTATIONS} == mutations.TESTS.keys()
