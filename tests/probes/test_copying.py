"""What a copying model keeps: the dense peers, the pieces of the page, and a model that is read with each of them."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from crt_exp.attention import exact_attention
from crt_exp.report import page
from crt_exp.runner.command_line import check_command_line
from crt_exp.probes import copying, dense_peers, runs, texts

PEERS = {name: partial(dense_peers.PEERS[name], first=16) for name in ("largest", "pages", "clusters")}


@pytest.fixture
def heads():
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 160, 8, generator=g, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("peer", PEERS)
def test_peers_are_exact_where_they_see_all_keys(heads, peer):
    assert_close(PEERS[peer](*heads, 160), exact_attention(*heads, causal=True))


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("count", [0, 16])
def test_peers_weigh_to_one_and_see_no_later_token(heads, peer, count):
    q, k, v = heads
    ones = torch.ones_like(v)
    assert_close(PEERS[peer](q, k, ones, count), ones)
    if peer != "clusters":                                   # whose centroids are of the whole sequence
        early = PEERS[peer](*(t[:, :, :96] for t in heads), count)
        assert_close(PEERS[peer](q, k, v, count)[:, :, :96], early)


def test_clusters_are_their_means(heads):
    """Where no keys are read each cluster counts as often as it has keys, at its centroid, with their mean value."""
    q, k, v = heads
    centres, cell = dense_peers.kmeans(k, dense_peers.cells_at(160))
    i, h = 159, 0
    past = torch.arange(160)
    near = (past > i - dense_peers.NEAR) | (past < 16)
    logits, values = [q[0, h, i] @ k[0, h, near].T], [v[0, h, near]]
    for c in range(centres.shape[2]):
        mine = (cell[0, h] == c) & ~near
        if mine.any():
            logits.append((q[0, h, i] @ centres[0, h, c] + mine.sum().log())[None])
            values.append(v[0, h, mine].mean(0)[None])
    expected = torch.cat(logits).softmax(-1) @ torch.cat(values)
    assert_close(PEERS["clusters"](q, k, v, 0)[0, h, i], expected)


def test_a_model_is_read_with_each_attention_and_is_itself_again(monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                         intermediate_size=16)).eval()
    monkeypatch.setattr(copying, "model_of", lambda start: (model, None))
    text = torch.randint(50, (8, 160), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(copying, "blocks", lambda start, split, length: text)
    rows = copying.passages("", "test", 160, 3)
    assert torch.equal(rows, copying.passages("", "test", 160, 3)) and rows.shape == (copying.ROWS, 160)
    exact = copying.losses("exact", "", 160, 0)
    for attention in ("largest keys=160", "clusters keys=160 first=16", "nearfar", "pages keys=160"):
        found = copying.losses(attention, "", 160, 0)
        assert all(np.allclose(found[kind], exact[kind], atol=1e-5) for kind in exact)
    assert copying.losses("uniform", "", 160, 0)["new"] != exact["new"]
    assert copying.losses("exact", "", 160, 0) == exact
    spent = copying.times({"exact": "exact", "bounded": "nearfar preset=bounded"}, "", 160, 2, 0)
    assert [row["arm"] for row in spent] == ["exact", "bounded"]
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in spent)


def test_gain_is_what_copied_text_is_cheaper(monkeypatch):
    monkeypatch.setattr(copying, "bench_of", lambda *_: Told())
    assert copying.losses("exact", "", 64, 0) == {"new": 3.5, "copied": 1.0, "gain": 2.5}


class Told:
    """A bench of rows whose losses are known: 3 and 4 nats for new text, 1 for copied."""

    rows = torch.tensor([[3] * 64, [4] * 64])
    swapped = staticmethod(lambda attention: nullcontext())

    def nats(self, inputs, labels):
        return torch.cat([inputs[0, :32].double(), torch.ones(31).double()])


@pytest.mark.parametrize("size", ["small", "gpu", "full"])
def test_stages_are_command_lines_that_go_on_from_each_other(size, tmp_path, monkeypatch):
    """Each by all that are before it; more steps are another place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    given = page.load("copying")["sizes"][size]["starts"]["copying"]
    start = runs.Start.read("copying", given)
    home = start.home(tmp_path, [])
    lines = start.lines(0, home)
    assert len({home.place(line) for line in lines}) == 4
    assert all(f"task.init={home.place(before)}" in line for before, line in zip(lines, lines[1:]))
    assert not [option for option in lines[0] if option.startswith("task.init")]
    for line in lines:
        check_command_line([*line, "trainer.keep=1", "resume=auto", "logger=none", "hydra.run.dir=run"])


def test_what_stages_name_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("one two Three four\n" * 300)
    monkeypatch.setattr(texts, "official_file", lambda name, split: tmp_path / "train.txt")
    texts.prepare(["task.text=[/data/train.tokens,outputs/texts/drawn-5.tokens]", "task.model=outputs/texts/llama-270"])
    lines = (texts.FOLDER / "drawn-5.tokens").read_text().splitlines()
    assert len(lines) == 5 and all(len(line.split()) == texts.WORDS for line in lines)
    assert {*" ".join(lines).split()} == {"one", "two", "three", "four"}
    config = LlamaConfig.from_pretrained(texts.FOLDER / "llama-270")
    assert config.hidden_size == 128 and (texts.FOLDER / "llama-270/tokenizer.json").exists()
