"""Fixtures of the tests of data."""

import pytest

from crt_exp.experiments.data.vocabularies import new_tokenizer


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "a.txt"
    path.write_text("one two\n\nthree\n")
    return new_tokenizer("byte_pairs", path, 300)
