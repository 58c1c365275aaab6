"""What is measured of each attention, and how often: nothing twice that is known already."""

import re
from contextlib import contextmanager

import pytest
import torch
import transformers
from small_bert import VOCABULARY

from crt_exp.advice.arms import Arm, candidates
from crt_exp.advice.trial import Trial
from crt_exp.advice.verdict import Advice, Row, cells_of, differ, header, is_within, pays_from
from crt_exp.attention.baselines import Window, exact_attention
from crt_exp.mechanism import Mechanism
from crt_exp.advice.bench import FIRST, Bench, Known
from crt_exp.advice.bench_pieces import TextBench

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, ROUNDS = 2048, 3
COSTS = {"exact": 0.0, "nearfar": 0.001, "window": 0.03, "favorsharp": 5.0, "favorpp": 6.0, "uniform": 5.5}   # nats


class Scripted(Bench):
    """A bench whose losses are told, that writes down what is read: pieces of the longest length."""

    noun, causal, repeats = "texts", True, 4

    def __init__(self):
        super().__init__(torch.nn.Linear(1, 1), range(8), range(4))
        self.read, self.now, self.seen = {}, None, set()

    @contextmanager
    def swapped(self, attention, layers=None):
        self.now = "exact" if attention is None else attention.name
        self.count(len(self.training) * (self.known(attention).wants_fit and self.now not in self.seen))
        self.seen.add(self.now)
        yield {}

    def count(self, pieces):
        self.read[self.now] = self.read.get(self.now, 0) + pieces

    def known(self, attention):
        kind = getattr(attention, "name", "exact")
        return Known(2048 if kind == "nearfar" else 0, kind == "nearfar", kind in ("favorsharp", "favorpp"))

    def loss(self, i):
        self.count(1)
        return 2.7 + COSTS[self.now] + 0.01 * i

    def again(self, i):
        return self.loss(i) - 2.5

    def timed(self):
        return {length: length for length in (128, 256, 512, 1024, LENGTH)}

    def times(self, arms, piece, rounds, call=None, once=()):
        found = {}
        for label, each in arms.items():
            with self.swapped(each):
                turns = 1 if label in once else rounds
                self.count(turns * (3 if call == self._step else 1) * piece / LENGTH)
                found[label] = [1000.0 + turn for turn in range(turns)]
        return found

    def first(self, attention, piece):
        with self.swapped(attention):
            self.count(1)
        return 1000.0, 1.0


def trial_of(bench, *names, **given):
    arms = [Arm("exact"), *map(Arm, names)] if names else candidates(quick=False)
    return Trial(bench, arms, **{"rounds": ROUNDS, "tolerance": 0.02} | given)


def test_candidates_read_few_pieces():
    """At 2048 tokens, where a pass of SmolLM2-135M takes 5 s on two idle cores: within ten minutes. Each fit and each
    time anew, of all attentions, were hundreds of passes."""
    bench = Scripted()
    trial = trial_of(bench)
    lines = []
    for _ in trial.measured(lines.append):
        pass
    assert sum(bench.read.values()) < 95
    assert bench.read["favorpp"] < 14 < bench.read["exact"]
    rows = {row.arm.label: row for row in trial.advice().rows}
    assert rows["favorpp"].pieces == rows["uniform"].pieces == rows["nearfar preset=cheap"].pieces == FIRST
    assert rows["exact"].pieces == rows["window"].pieces == 8      # 0.03 nats are not clearly too many
    assert rows["favorpp"].step is None and rows["exact"].step
    assert "without training steps, which are long" in str(trial.advice())
    assert lines[-1].startswith("advise: 2048 tokens timed, 13 of 13") and "left" not in lines[-1]
    assert re.fullmatch(r"advise: 8 attentions, 8 texts of 2048 tokens: about \d+ s", lines[0])
    left = [float(re.search(r"at most (\d+) s left", line)[1]) for line in lines[1:-1]]
    assert len(left) == 12 and "favorpp: +6.000 nats, 7 of 13" in lines[7]


def test_what_was_done_is_not_measured_again():
    first, second = Scripted(), Scripted()
    rows = list(trial_of(first, "window", "favorpp").measured(lambda line: None))
    trial = trial_of(second, "window", "favorpp", done=rows[:-1])
    assert not trial.ended and list(trial.measured(lambda line: None)) == rows[-1:] and trial.ended
    assert sum(second.read.values()) < sum(first.read.values())
    assert str(trial.advice()) == str(trial_of(first, "window", "favorpp", done=rows).advice())


def test_attention_that_is_exact_is_measured_once_and_said():
    bench = Scripted()
    trial = Trial(bench, [Arm("exact"), *(Arm("nearfar", {"preset": each}) for each in ("cheap", "quality"))], 2, 0.02)
    cheap, quality = list(trial.measured(lambda line: None))[1:3]
    assert cheap["loss"] == quality["loss"] and len(cheap["loss"]) == FIRST
    for row in trial.rows[3:]:
        assert row["ms"]["nearfar preset=cheap"] == row["ms"]["nearfar preset=quality"]
    assert ("nearfar preset=cheap, nearfar preset=quality: exact attention itself at 2048 tokens, by one kernel, which "
            "was measured once.") in str(trial.advice())
    bench = TextBench(llama(), ids(4), ids(1))
    trial = Trial(bench, [Arm("exact"), Arm("nearfar"), Arm("window")], 1, 0.02)
    assert len(list(trial.measured(lambda line: None))) == 4
    kernel, window = trial.advice().notes[:2]
    assert kernel.startswith("nearfar: exact attention itself at 64 tokens, by one kernel")
    assert window == "window: exact attention itself at 64 tokens, where every query sees all keys that it may."


# ---- a bench of a model


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=len(VOCABULARY),
        max_position_embeddings=256)).eval()


def ids(rows, length=64):
    return torch.randint(5, len(VOCABULARY), (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["favorpp", "favorsharp"])
def test_attention_is_fitted_once(name):
    """What a fit left is there again, to the last bit, whatever was there between."""
    model, attention = llama(), Mechanism.parse(name)
    bench, read = TextBench(model, ids(2), ids(2)), []
    model.model.register_forward_hook(lambda *_: read.append(1))
    first = bench.losses(attention)
    assert len(read) == 2 + 4
    bench.losses(Mechanism.parse("favorpp m=8"))
    read.clear()
    assert bench.losses(Mechanism.parse(name)) == first and len(read) == 4
    assert bench.known(attention).wants_fit and len(read) == 4


def test_what_is_clearly_near_or_far_reads_few_pieces():
    """Far: one that is said again; near: FIRST, for a word on recall as well; else all."""
    costs = {"window": 0.4, "favorpp": 0.004, "favorsharp": 0.015}
    bench = Scripted()
    bench.known = lambda attention: Known(0, False, False)
    bench.loss = lambda i: 2.7 + costs.get(bench.now, 0) + 0.01 * i
    trial = trial_of(bench, *costs)
    far, near, between = list(trial.measured(lambda line: None))[1:4]
    assert [[len(each[key]) for key in ("loss", "again")] for each in (far, near, between)] == [
        [FIRST, 1], [FIRST, FIRST], [8, 4]]
    said = str(trial.advice())
    assert f"window: clearly further than is allowed after {FIRST} texts, so judged on these alone and timed " in said
    assert f"favorpp: clearly nearer than is allowed after {FIRST} texts, so judged on these alone." in said
    assert re.search(r"0.4000 ± 0.0000 +0.4000 +3 ", said) and not is_within(trial.advice().rows[3], 0.02, True)


def test_pieces_are_read_until_they_are_enough():
    bench = TextBench(llama(), ids(5), ids(1))
    all_of_them = bench.losses(None)
    assert [len(each) for each in all_of_them.values()] == [5, 4]
    few = bench.losses(None, lambda losses: [len(each) for each in losses.values()] == [FIRST, FIRST])
    assert few == {key: each[:FIRST] for key, each in all_of_them.items()}
    assert bench.losses(None, lambda losses: False) == all_of_them
    assert [*map(len, bench.losses(None, lambda losses: True).values())] == [FIRST, 1]


@pytest.mark.parametrize("ms, turns", [(2.0, [3, 1]), (1500.0, [1])])
def test_long_steps_have_one_turn_and_what_is_out_none(ms, turns, monkeypatch):
    bench = TextBench(llama(), ids(2), ids(1))
    monkeypatch.setattr("crt_exp.advice.bench.again", lambda *given, **options: ms)
    monkeypatch.setattr(bench, "first", lambda *given: (ms, 1.0))
    cost = bench.cost({"exact": None, "uniform": Mechanism.of("uniform")}, 64, 3, ["uniform"])
    assert [len(each) for each in cost["step"].values()] == turns
    assert [len(each) for each in cost["ms"].values()] == [3, 1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block, first", [(8, 2), (8, 8), (4, 9), (4, 20)])
def test_a_window_says_up_to_where_it_sees_all_keys(block, first, causal):
    layer = Window(2, 4, block=block, first=first, causal=causal)
    for length, exact in ((layer.exact_to, True), (layer.exact_to + 1, False)):
        q, k, v = torch.randn(3, 1, 2, length, 4, dtype=torch.float64)
        apart = (layer(q, k, v) - exact_attention(q, k, v, causal=causal, scale=0.5)).abs().max()
        assert (apart < 1e-9) == exact


# ---- times that are not told apart


def test_times_of_which_rounds_do_not_agree_are_not_told_apart():
    assert differ([10, 12, 10], [5, 6, 8]) and differ([10, 12], [20, 30])
    assert not differ([10, 12, 10], [5, 6, 10]) and not differ([29, 10, 10], [10, 11, 9])
    exact, near, floor = (Row(Arm(name), above, 0.001, ms={128: 2.0, 512: 8.0}, step=1.0, speedup=1.0)
                          for name, above in (("exact", 0.0), ("nearfar", 0.001), ("uniform", 2.0)))
    near.speedup, near.told_apart = 2.9, False
    found = Advice([exact, near, floor], 512, 8, 3.0, None, 0.02, {})
    near.step_told_apart = False
    cells = dict(zip(header(found), cells_of(found, near)))
    assert all(cells[name].endswith(" ≈") for name in ("ms forward", "ms step", "speed-up", "pays from"))
    assert not any("≈" in cell for row in (exact, floor) for cell in cells_of(found, row))
    assert found.chosen is None and "its time is not told apart from that of exact" in found.sentence
    near.told_apart, near.pays_from = True, pays_from({128: 2.0}, {128: 1.0})
    assert Advice([exact, near, floor], 512, 8, 3.0, None, 0.02, {}).chosen is near
