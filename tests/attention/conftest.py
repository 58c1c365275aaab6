import pytest
from helpers.attention_cases import set_chunks

from crt_exp.attention import engines


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks, segments and kept states within a few tokens, and ragged ends."""
    set_chunks(monkeypatch, 4)


@pytest.fixture(params=["c", "plain"])
def engine(request, monkeypatch):
    """Both ways to do float32 on a CPU: the library in C, and PyTorch's operators."""
    if request.param == "plain":
        monkeypatch.setattr(engines, "PLAIN_CHOSEN", True)
