import pytest
from helpers.attention_cases import set_chunks

from crt_exp.attention.engines import native


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks, segments and kept states within a few tokens, and ragged ends."""
    set_chunks(monkeypatch, 4)


@pytest.fixture
def by_products(monkeypatch):
    """Closed forms by PyTorch's products, also where the library in C would do the work
    (tests/attention/test_native.py tests that)."""
    monkeypatch.setattr(native, "applies", lambda *tensors: False)


@pytest.fixture(params=["native", "products"])
def engine(request):
    """Both ways to do float32 on a CPU."""
    if request.param == "products":
        request.getfixturevalue("by_products")
