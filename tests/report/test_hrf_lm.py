"""make hrf-lm, hrf-sampled and ptb-peer: what they compute, and that their verdicts follow it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from crt_exp.models.lstm import WordLSTM
from crt_exp.report import hrf_lm, hrf_lm_page, hrf_lm_runs, hrf_sampled, plain_lstm, ptb_peer, writing
from crt_exp.report.evidence import GateFailed, judged
from crt_exp.report.hrf_lm_runs import CONTROLS, HYBRIDS, Found, Model, Setting
from crt_exp.report.hrf_lm_verdicts import claims, error_ratio, gates
from crt_exp.report.hrf_sampled_runs import FEATURES, NAMES, overrides
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies.distributions import Distances

LM = Setting(models=(Model("Model", ("task.corpus=ptb",), most=130.0),), ms=(8, 16), draws=4)


def lm(better=0.5, unigram=600.0, apart=0.3, moments=2.0):
    """Results in which FAVOR++ and the hybrids have `better` times the distances of the others."""
    rng = np.random.default_rng(0)

    def of(name, m):
        scale = (better if name in ("favorpp", *HYBRIDS) else 1.0) * 8 / m * math.exp(0.05 * rng.normal())
        return Distances(9 * scale, 0.2 * scale, 1e-4 * scale, 0.3 * scale, 0.3 * scale * (name != "favorp"), 0.0)
    models = {"Model": {"curve": [[1, 150.0], [2, 120.0]], "test": 110.0, "unigram": unigram, "seconds": 60.0}}
    looks = {"Model": {"x": 4.0, "y": 2.0, "S": 6.0, "moments": {"favorp": moments, "favorpp": 1.0}}}
    controls = {("Model", law): Distances(20.0, apart, 1e-4, 0.5, 0.0, 0.0) for law in CONTROLS}
    arms = {("Model", name, m, seed): of(name, m) for name in LM.arms for m in LM.ms for seed in range(LM.draws)}
    whole = {("favorp", 64): {"seconds": 30.0, "mib": 300.0, "words": 82430, "cores": 2}}
    return Found(LM, models, looks, controls, arms, whole)


@pytest.mark.parametrize("better, word", [(0.5, "holds"), (2.0, "fails")])
def test_verdicts_on_softmax_estimates_follow_the_distances(better, word):
    told = judged(claims(lm(better)))
    assert len(told) == 4 * 6 + 2 and {verdict.word for verdict in told} == {word}


def test_a_softmax_that_cannot_tell_is_refused():
    assert len(gates(lm())) == 3 and all(gate.passed for gate in gates(lm()))
    for words, wrong in (("better than the unigram law", lm(unigram=150.0)), ("from the unigram's", lm(apart=0.05)),
                         ("predicted error", lm(moments=1.1))):
        failed = [gate.text for gate in gates(wrong) if not gate.passed]
        assert len(failed) == 1 and words in failed[0]
    assert error_ratio({"favorp": 1e4, "favorpp": 1.0}) > 1e300                       # where errors overflow


def test_the_page_of_softmax_estimates(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    found = lm(3.0)
    hrf_lm_page.write("small", found, gates(found), 1.0)
    text = (tmp_path / "hrf-lm.md").read_text()
    assert "**Model: the uniform law, which knows no query, is at least as near" in text.splitlines()[2]
    assert "- **met**: Model: perplexity on the validation split at most 130: 120.0" in text
    assert "| trigonometric | 16 |" in text and "| 82430 | 30.0 | 300 | met |" in text
    assert (tmp_path / "hrf-lm.png").stat().st_size > 20_000 and "written:" in capsys.readouterr().out


def test_arms_of_a_seed_have_the_same_rows_and_hybrids_about_as_many_operations():
    draw = lambda name: hrf_lm_runs.mechanism_of(name, 64, seed=3)
    assert [draw(name).m for name in ("favorp", *HYBRIDS)] == [64, 8, 8]
    assert [draw(name).features.content["n"] for name in HYBRIDS] == 2 * [hrf_lm_runs.COEFFICIENTS]


@pytest.mark.parametrize("size", ["small", "gpu", "full"])
def test_every_run_is_a_command_line(size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    runs = [model.overrides for model in hrf_lm.SETTINGS[size].models]
    runs += [overrides(name, 2, hrf_sampled.SETTINGS[size]) for name in ("unigram", "favorp", HYBRIDS[0])]
    for run in runs:
        check_command_line([*run, "trainer.keep=1", "resume=auto", "logger=none", "hydra.run.dir=run"])


@pytest.mark.slow
def test_hrf_lm_at_a_tiny_size(tmp_path, monkeypatch, capsys, one_thread):
    """All of it on the generated text, and again without computing anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    options = ("task.width=8", "trainer.steps=4", "trainer.eval_every=2", "trainer.batch=5")
    setting = Setting(models=(Model("Model", options, every=3, most=1.0),), ms=(8,), draws=2, workers=1,
                      whole=(("favorp", 8),))
    monkeypatch.setitem(hrf_lm.SETTINGS, "small", setting)
    with pytest.raises(GateFailed, match="better than the unigram law"):
        hrf_lm.main("small")
    cells = tmp_path / "outputs/hrf-lm/cells.jsonl"
    assert len(cells.read_text().splitlines()) == 1 + 2
    monkeypatch.setattr(hrf_lm, "check_gates", list)
    hrf_lm.main("small")
    text = (tmp_path / "report/hrf-lm.md").read_text()
    assert "**failed**" in text and "**not met**: Model: perplexity" in text and "| the angular hybrid | 8 |" in text
    computed = cells.read_text()
    hrf_lm.main("small")
    assert cells.read_text() == computed and "written:" in capsys.readouterr().out


# ---- hrf-sampled


def sampled(better=0.05, spread=0.1, unigram=600.0, diverged=()):
    """Losses in which negatives by features end `better` nats below uniform ones, and exact ones `spread` below."""
    rng = np.random.default_rng(0)
    loss = {"full": 4.9, "exact": 5.0 - spread, "uniform": 5.0, "log_uniform": 5.0, "unigram": 5.0}

    def run(name):
        end = loss.get(name, 5.0 - better) + 0.002 * rng.normal()
        return {"curve": [[1.0, end + 0.2], [2.0, end]], "loss": end, "perplexity": math.exp(end),
                "unigram": unigram, "seconds": 10.0}
    return hrf_sampled.Found({(name, seed): {"diverged": "step 1"} if (name, seed) in diverged else run(name)
                              for name in NAMES for seed in range(4)})


@pytest.mark.parametrize("better, word", [(0.05, "holds"), (-0.05, "fails")])
def test_verdicts_on_samplers_follow_the_losses(better, word):
    told = {verdict.claim.text: verdict.word for verdict in judged(hrf_sampled.claims(sampled(better)))}
    laws = {text: w for text, w in told.items() if "no higher loss" in text}
    assert len(laws) == 2 * len(FEATURES) and set(laws.values()) == {word}
    near = [w for text, w in told.items() if "nats apart" in text]
    assert len(near) == 4 and set(near) == {"holds"}


def test_samplers_that_cannot_differ_are_refused():
    assert all(gate.passed for gate in hrf_sampled.gates(sampled()))
    for wrong in (sampled(spread=0.0), sampled(unigram=150.0)):
        assert [gate.passed for gate in hrf_sampled.gates(wrong)].count(False) == 1


def test_the_page_of_samplers_counts_runs_that_diverged(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    found = sampled(-0.01, diverged=[("favor", seed) for seed in range(3)])
    hrf_sampled.write("small", hrf_sampled.SETTINGS["small"], found, [], 1.0)
    text = (tmp_path / "hrf-sampled.md").read_text()
    assert text.splitlines()[2] == "**The uniform law of negatives, a control, beats 5 of 5 arms.** test loss: 5."
    assert next(line for line in text.splitlines() if line.startswith("| trigonometric")).endswith("| 3 of 4 |")
    assert (tmp_path / "hrf-sampled.png").stat().st_size > 20_000


@pytest.mark.slow
def test_hrf_sampled_at_a_tiny_size(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setattr(hrf_sampled, "check_gates", list)
    options = ("task.width=8", "trainer.steps=4", "trainer.eval_every=2")
    setting = replace(hrf_sampled.SETTINGS["small"], options=options, m=16, n=4, seeds=2, workers=1)
    monkeypatch.setitem(hrf_sampled.SETTINGS, "small", setting)
    hrf_sampled.main("small")
    text = (tmp_path / "report/hrf-sampled.md").read_text()
    assert all(f"| {hrf_sampled.label(name)} |" in text for name in NAMES) and "0 of 2" in text
    assert not [path for path in (tmp_path / "outputs/hrf-sampled").iterdir() if path.is_dir()]


# ---- ptb-peer


def text_files(folder):
    rng = np.random.default_rng(0)
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        rows = [" ".join(rng.choice(list("abcdef"), 6)) for _ in range(lines)]
        (folder / f"ptb.{split}.txt").write_text("\n".join(rows) + "\n")
    return folder


def test_plain_pytorch_is_the_same_model(tmp_path, one_thread):
    """The same weights give the same logits; an interrupted run goes on to the same numbers."""
    options = plain_lstm.Options(8, 2, 0.0, 5, 4, 2, 1e-2, (0.9, 0.99), 0.35, 3, True, 0)
    theirs, ours = plain_lstm.Model(7, options).eval(), WordLSTM(7, 8, 2, 0.0).eval()
    renamed = {name.replace("rnn", "lstm").replace("encoder", "embedding"): t for name, t in
               theirs.state_dict().items() if not name.startswith("decoder")}
    ours.load_state_dict(renamed)
    words = torch.randint(7, (5, 4))
    logits = ours(words.T)[0] @ ours.embedding.weight.T
    torch.testing.assert_close(theirs(words, None)[0].view(5, 4, 7), logits.transpose(0, 1))
    files = {split: text_files(tmp_path) / f"ptb.{name}.txt" for split, name in ptb_peer.SPLITS.items()}
    whole = plain_lstm.run(files, options, tmp_path / "whole")
    real = plain_lstm.save

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(plain_lstm, "save", interrupted)
        plain_lstm.run(files, options, tmp_path / "stopped")
    assert plain_lstm.run(files, options, tmp_path / "stopped") == whole and len(whole) == 2


@pytest.mark.slow
def test_ptb_peer_at_a_tiny_size(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ptb").mkdir()
    monkeypatch.setenv("CRT_DATA", str(text_files(tmp_path / "ptb").parent))
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    options = ("task.corpus=ptb", "task.width=8", "trainer.epochs=6", "trainer.batch=4", "task.bptt=5",
               "task.dropout=0", "trainer.lr=1e-2")
    monkeypatch.setitem(hrf_lm.SETTINGS, "small", Setting(models=(Model("Model", options, most=1.0),)))
    ptb_peer.main("small")
    out = capsys.readouterr().out
    assert "- **met**: at most 1.03 times" in out and "- **not met**: perplexity at most 1" in out
