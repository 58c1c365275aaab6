"""The board: rows of one form, measured by the probe of the page pretrained, rendered, and measured again."""

import json
import os

import pytest
import torch
from pages import BLOCKS, ROOT
from transformers import LlamaConfig, LlamaForCausalLM

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.mechanism import Mechanism
from crt_exp.probes import board, board_check, board_rows, pretrained
from crt_exp.probes import pretrained_presses as presses
from crt_exp.probes.called import Called, function_of

LENGTH = 128
OWN = '''
import torch

def local(q, k, v, mask, near=8):
    place = torch.arange(k.shape[-2])
    seen = mask & (place[:, None] - place < near)
    return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v

def wrong(q, k, v, mask):
    return v[..., :1]
'''


@pytest.fixture
def model(monkeypatch, tmp_path, one_thread):
    """The folder of a tiny model, with one row of text after another."""
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.5)).eval()
    made.save_pretrained(tmp_path / "tiny")
    (tmp_path / "mine.py").write_text(OWN)
    text = torch.randint(1, 97, (28_000,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(pretrained, "opened", lambda name: pretrained.Opened(made, None))
    monkeypatch.setattr(pretrained, "tokens", lambda name, split: text)
    monkeypatch.chdir(tmp_path)
    for each in (pretrained.exact_of, presses.package):
        each.cache_clear()
    return "tiny"


@pytest.mark.parametrize("method", ["exact", "window block=8 first=2", "mine.py:local near=8", "favorp m=8"])
def test_a_row_is_of_the_form_and_is_reproduced(method, model, tmp_path):
    row = board.measured(method, model, LENGTH, 2)
    path = board_rows.write(row, tmp_path / "rows")
    assert board_rows.read(path) == row and board_check.check(tmp_path / "rows") == []
    assert (row["repeated"]["mean"] == 0) == (method == "exact") and row["ms"] is None
    assert f"| `{method}` |" in board_rows.render(tmp_path / "rows").read_text()


def test_what_is_not_reproduced_is_said(model, tmp_path, capsys):
    row = board.measured("window block=8 first=2", model, LENGTH, 2)
    better = row | {"repeated": board_rows.text_of([0.0, 1e-4], row["repeated"]["exact"])}
    board_rows.write(better, tmp_path / "rows")
    assert "repeated text has" in board_check.check(tmp_path / "rows")[0]
    board_rows.write(better | {"sha256": "of another model"}, tmp_path / "rows")
    assert board_check.check(tmp_path / "rows") == []
    assert "not measured: tiny is another file here" in capsys.readouterr().out


@pytest.mark.parametrize("change, said", [
    ({"length": "long"}, "length = long: it takes a whole number"), ({"form": 2}, "form = 2"),
    ({"sha256": None}, "sha256"), ({"more": 1}, "unknown key 'more'"),
    ({"new": {"above": [1.0, 2.0], "exact": [1.0, 1.0], "mean": 0.1, "ci95": 0.1}}, "new.mean and new.ci95 are not")])
def test_what_is_not_of_the_form_is_refused(change, said, model, tmp_path):
    row = board.measured("exact", model, LENGTH, 2)
    (tmp_path / "row.json").write_text(json.dumps(row | change))
    with pytest.raises(ConfigError, match="row.json: ") as error:
        board_rows.read(tmp_path / "row.json")
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


def test_keys_that_are_read(model):
    count = lambda method: board.costs(method, model, LENGTH, 0)["keys"]
    assert count("exact") == (LENGTH + 1) / 2 and count("uniform") == pytest.approx((LENGTH + 1) / 2, abs=1)
    assert count("mine.py:local near=8") == pytest.approx(8, abs=0.6) and count("favorp m=8") == 8
    assert count("SnapKVPress keys=16") == 16 + (LENGTH // 2 + 1) / 2


def test_times_are_those_of_the_page(model):
    spent = board.costs("window block=8 first=2", model, LENGTH, 1)
    assert spent["ms"] > 0 and spent["exact_ms"] > 0


def test_a_function_is_given_what_it_asks_for(model):
    """Scaled queries, a head of keys for each, and a mask; as the formula it is the layer window has."""
    q, k, v = torch.randn(1, 2, 20, 4), torch.randn(1, 1, 20, 4), torch.randn(1, 1, 20, 4)
    full = Called("mine.py:local", {"near": 20}, 2, 4, kv_heads=1, causal=True)(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(full, exact)
    padded = Called("mine.py:local", {"near": 20}, 2, 4, kv_heads=1, causal=True)(
        q, k, v, torch.arange(20)[None] < 15)[:, :, :15]
    torch.testing.assert_close(padded, exact[:, :, :15])
    with pytest.raises(ValueError, match=r"'mine.py:wrong': got \(1, 2, 20, 1\), expected a tensor of shape \(1, 2, 2"):
        Called("mine.py:wrong", {}, 2, 4, kv_heads=1, causal=True)(q, k, v)


@pytest.mark.parametrize("name, said", [("nowhere.py:f", "there is no such file"), ("mine.py:other", "no attribute"),
                                        ("no.such.module:f", "No module named"), ("math:pi", "expected a function")])
def test_functions_that_are_none(name, said, model):
    with pytest.raises(ConfigError, match=said):
        function_of(name)


def test_methods_and_models_that_are_none(model):
    with pytest.raises(ConfigError, match="unknown attention 'windo'"):
        board.Board("windo block=8", model, LENGTH, 2, 0, "rows")
    with pytest.raises(DataError, match="no weights in nothing"):
        board.Board("exact", "nothing", LENGTH, 2, 0, "rows")


def test_a_run_writes_its_row_and_goes_on(model, tmp_path):
    task = board.Board("uniform", model, LENGTH, 2, 0, "rows")
    records = list(task.records(Mechanism.of("exact"), 0))
    assert list(task.records(Mechanism.of("exact"), 0, records[:3])) == records[3:]
    task.keep(records, tmp_path / "run")
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["tiny-128-uniform.json"]
    assert "repeated text " in task.summary(records) and records[-1]["repeated_above"] > 0


def test_the_function_of_the_docs_is_a_method(model, tmp_path):
    (tmp_path / "topk.py").write_text(next(block.text for block in BLOCKS if "def topk(q" in block.text))
    row = board.measured("topk.py:topk keys=8", model, LENGTH, 2)
    assert row["keys"] == pytest.approx(8, abs=0.6) and row["new"]["mean"] > 0


# ---- what is committed


def test_rows_that_are_committed_are_of_the_form():
    """And the page is made of them."""
    folder = ROOT / board_rows.FOLDER
    found = board_rows.rows(folder)
    assert all(path == board_rows.path_of(row, folder) for path, row in found.items())
    text = (folder / "board.md").read_text()
    assert all(f"| `{row['method']}` |" in text for row in found.values())


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CRT_DATA"), reason="CRT_DATA is not set: the models and WikiText-2 are needed")
def test_rows_that_are_committed_are_reproduced():
    """Those of models that are here as the same files."""
    assert board_check.check(ROOT / board_rows.FOLDER) == []
