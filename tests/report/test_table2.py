"""make table2: every run that it starts is a command line, arms of a pair differ in attention alone, encoders that
cannot tell stop, verdicts follow the records, and a whole report of tiny encoders."""

import json
from dataclasses import replace

import numpy as np
import pytest
from small_bert import write_glue, write_text

from crt_exp.report import runs, table2, table2_encoders, table2_glue, table2_page, table2_runs, writing
from crt_exp.report.evidence import GateFailed, Unjudged, Verdict
from crt_exp.report.fidelity import ENCODER, ONCE, sizes, stage
from crt_exp.report.table2_runs import CHARACTERS, EXACT, PIECES, UNIFORM, Glue, Kind
from crt_exp.report.table2_verdicts import (
    Found,
    beaten,
    beaten_on_glue,
    gates,
    glue_claims,
    has_signal,
    power,
    verdicts,
)
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies.fidelity import Arm

SMALL = replace(table2.SETTINGS["small"], kinds=table2.SETTINGS["small"].kinds[:2])


def keys_of(setting):
    """All that train: exact encoders, uptraining, encoders from scratch, fine-tuning."""
    made = [kind.key(seed, number) for kind in setting.kinds for number in range(len(kind.stages))
            for seed in range(setting.encoders)]
    datasets = setting.glue.datasets
    return [made, table2_runs.uptraining(setting, setting.kinds).values(), table2_runs.from_scratch(setting).values(),
            table2_runs.fine_tuning(setting, setting.kinds[1], datasets, table2_runs.glue_arms(setting)).values(),
            table2_runs.scratch_tuning(setting, datasets).values()]


@pytest.mark.slow
@pytest.mark.parametrize("size", table2.SETTINGS)
def test_every_run_is_a_command_line(size, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    seen = set()
    for keys in keys_of(table2.SETTINGS[size]):
        for key in keys:
            given = key["stages"][-1] if "stages" in key else key["overrides"]
            more = table2_runs.attention(Arm(key["text"], key["m"])) if "text" in key else []
            more += [f"{key.get('option', 'task.model')}={key['start']}"] if "start" in key else []
            shape = tuple(o if o.startswith("attention=") else o.split("=")[0] for o in [*given, *more])
            if shape not in seen:
                seen.add(shape)
                check_command_line([*given, *more, "resume=auto", "logger=none", "hydra.run.dir=run"])
    assert len(seen) > 15


def test_arms_of_a_pair_differ_in_attention_alone():
    for kind in SMALL.kinds:
        keys = table2_runs.uptraining(SMALL, [kind])
        own = ("attention", "features.m=")
        of_pair = {arm: key for (_, arm, pair), key in keys.items() if pair == 1}
        shared = {(*(o for o in key["overrides"] if not o.startswith(own)), key["start"]) for key in of_pair.values()}
        assert len(of_pair) >= 6 and len(shared) == 1 and "seed=1001" in shared.pop()
        judged_pairs = [pair for _, arm, pair in keys if arm == Arm("favorpp", 256)]
        assert len(judged_pairs) == 12 and len({keys[kind.title, EXACT, pair]["start"] for pair in judged_pairs}) == 2


# ---- what it says


def found_of(distance=0.3, uniform=1.5, S=9.0, ratio=1.5, exact=0.8):
    """All values: FAVOR+ above FAVOR++ by `distance` in nats, uniform attention above exact by `uniform`; `exact` is
    the share of GLUE answers of exact encoders that are right, those of FAVOR+ and uniform attention fewer."""
    setting, rng = SMALL, np.random.default_rng(0)
    level = {"exact": 0.0, "uniform": uniform, "favorpp": 0.5, "favorp": 0.5 + distance, "nearfar": 0.01,
             "favorsharp": 0.2}
    value = lambda arm: 1.3 + level.get(arm.name, 0.9) + 0.01 * rng.normal()
    look = {"losses": [1.3, 1.4], "uniform": [uniform, uniform], "S": [[S] * 8] * 3,
            "errors": {"favorp": [ratio] * 3, "favorpp": [1.0] * 3, "uniform": [2.0] * 3}}
    seeds = [(kind.title, seed) for kind in setting.kinds for seed in range(2)]
    record = {"loss": 1.3, "accuracy": 0.6, "perplexity": 3.7}
    found = Found(setting, dict.fromkeys(seeds, record), {CHARACTERS: 2.9, PIECES: 6.5}, dict.fromkeys(seeds, look),
                  kinds=list(setting.kinds))
    found.swaps = {key: value(key[1]) for key in table2_runs.swapping(setting, setting.kinds)}
    found.uptrained = {key: {str(step): value(key[1]) for step in (100, 200, 300)}
                       for key in table2_runs.uptraining(setting, setting.kinds)}
    labels = rng.integers(2, size=400).tolist()
    right = lambda share: np.where(rng.random(400) < share, labels, 1 - np.array(labels)).tolist()
    found.controls = {"sst2": {"labels": labels, table2_glue.MAJORITY: [1] * 400, table2_glue.OVERLAP: None}}
    run = lambda share: {"answers": right(share), "score": share, "examples": 40.0, "available": 50.0}
    found.tuned = {key: run(exact - 0.2 * (key[0].name == "favorp") - 0.3 * (key[0] == UNIFORM))
                   for key in table2_runs.fine_tuning(setting, setting.kinds[1], ["sst2"],
                                                     table2_runs.glue_arms(setting))}
    found.pretrained = dict.fromkeys(setting.glue.scratch_arms, {"perplexity": 300.0})
    found.scratch_unigram, found.datasets = 6.4, ["sst2"]
    found.scratch = {key: run(0.6) for key in table2_runs.scratch_tuning(setting, ["sst2"])}
    return found


def words(found):
    return {told.claim.text: told.word for told in verdicts(found, {}, glue_claims(found)) if isinstance(told, Verdict)}


@pytest.mark.parametrize("distance, word", [(0.3, "holds"), (-0.3, "fails")])
def test_verdicts_follow_the_losses(distance, word, monkeypatch):
    monkeypatch.setattr(table2_glue, "bootstrapped", lambda gap, n: table2_glue.Interval(gap(np.arange(n)), 1.0, 0., n))
    told = words(found_of(distance))
    plain = [text for text in told if "than FAVOR+ " in text]
    assert len(plain) == (3 + 3) + (3 + 1) and {told[text] for text in plain} == {word}
    assert told["word pieces: near-far is nearer to exact attention than FAVOR++, m = 256 directly after the "
                "swap"] == "holds"
    assert told["SST2: swapped into exact encoders and fine-tuned, FAVOR++ scores above FAVOR+, m = 256"] == "holds"
    assert len(told) == 10 + (5 + 4) + 1


@pytest.mark.parametrize("options, failed", [({}, None), ({"uniform": 0.4}, "uniform attention costs"),
                                             ({"S": 30.0}, "share of the heads"), ({"ratio": 1.1}, "error of FAVOR")])
def test_gates(options, failed):
    found = found_of(**options)
    told = [gate for kind in found.kinds for gate in gates(found, kind) if not gate.passed]
    assert len(told) == (2 if failed else 0) and all(failed in str(gate) for gate in told)


def test_a_task_that_needs_no_attention_is_not_judged():
    """As rows from scratch, which score alike with every attention."""
    found = found_of()
    passed, failed = (gate for _, gate in glue_claims(found))
    assert passed.passed and not failed.passed
    assert "what uniform attention costs, pretrained from scratch" in str(failed)
    left, = (told for told in verdicts(found, {}, glue_claims(found)) if isinstance(told, Unjudged))
    assert "SST2: pretrained from scratch" in left.claim.text and left.gate == failed


def test_controls_that_win_on_glue_are_told():
    def told(exact, worst):
        values = found_of(exact=exact)
        for (row, _, _), run in values.scratch.items():
            run["score"] = 0.6 + 0.1 * (row not in (worst, "uniform"))
        return beaten_on_glue(values)
    assert told(0.9, None).startswith("None of ")
    assert "SST-2: from scratch, ReLU." in told(0.9, "relu")
    assert "FAVOR+, m = 256" in told(0.45, None)                      # the majority class has about half right


def test_controls_and_power_are_told():
    assert "beats" not in beaten(found_of())
    told = beaten(found_of(uniform=0.7))
    assert "uniform attention, a control, beats" in told.lower() and "FAVOR+, m = 64" in told and "near-far" not in told
    assert has_signal(found_of(exact=0.9), "sst2") and not has_signal(found_of(exact=0.3), "sst2")
    lines = power(found_of())
    assert len(lines) == 4 and "12 pairs" in lines[0] and "+0.30" in lines[0]


def test_word_overlap(tmp_path, monkeypatch):
    """Words of both sentences over words of either; the cut of a class task is the best one of training."""
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    for name, folder in (("sst2", "SST-2"), ("stsb", "STS-B"), ("mrpc", "MRPC")):
        write_glue(tmp_path / "glue" / folder, name)
    assert table2_glue.controls("sst2")[table2_glue.OVERLAP] is None
    shared = np.array([0.1, 0.2, 0.6, 0.9])
    assert table2_glue.cut("mrpc", shared, [0, 0, 1, 1], np.array([0.0, 0.7, 1.0])) == [0, 1, 1]
    assert table2_glue.cut("rte", shared, [1, 1, 0, 0], np.array([0.0, 1.0])) == [1, 0]
    found = table2_glue.controls("stsb")
    assert len(found["labels"]) == len(found[table2_glue.OVERLAP]) == 12 and min(found[table2_glue.OVERLAP]) >= 0


@pytest.mark.slow
def test_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    found = found_of(uniform=0.7)
    table2_page.write("small", found, {kind.title: gates(found, kind) for kind in found.kinds}, 1.0)
    text = (tmp_path / "table2.md").read_text()
    assert text.splitlines()[2].startswith("**Uniform attention, a control, beats")
    assert "| from scratch: FAVOR++, m = 64 | " in text and "| majority class (control) |" in text
    assert "SST-2 40 of 50" in text and "90.58" in text and "written:" in capsys.readouterr().out
    assert (tmp_path / "table2.png").stat().st_size > 20_000
    found.kinds = found.kinds[:1]
    asked = {kind.title: gates(found_of(ratio=1.1), kind) for kind in SMALL.kinds}
    table2_page.write("small", found, asked, 1.0)
    assert "The encoders of word pieces cannot tell mechanisms apart" in (tmp_path / "table2.md").read_text()
    found.kinds, found.swaps, found.uptrained, found.tuned = [], {}, {}, {}
    table2_page.write("small", found, asked, 1.0)
    text = (tmp_path / "table2.md").read_text()
    assert text.splitlines()[2].startswith("**No encoder can tell") and text.count("a gate failed") == 3
    assert "from scratch: FAVOR++, m = 64" in text and "power:" not in text


# ---- a whole report


def tiny(least):
    """Gates at `least`, for encoders so small learn nothing."""
    common = (*sizes(16, 2, 2), *ENCODER, "task.cache_dir=null", *ONCE)
    kinds = (Kind(CHARACTERS, (*common, f"task.vocabulary={table2_runs.vocabulary_folder(20)}"),
                  (stage(10, 8, 20, "5e-3"),), 4, "nearfar block=2 heavy=1 cells=2", 3, (8, 4), texts=3),
             Kind(PIECES, (*common, "task.vocabulary_size=150"), (stage(8, 8, 10, "5e-3"), stage(16, 4, 10, "5e-3")),
                  4, "nearfar block=2 heavy=1 cells=2", 3, (8,), others=(), texts=3, fine_tuned=True))
    glue = Glue(("task.max_length=40", "task.cache_dir=null", "trainer.epochs=1", "trainer.eval_every=1000000",
                 "trainer.select=last", "trainer.batch=8", "trainer.lr=5e-3"),
                ("exact", "uniform", "favorp", "favorpp"),
                (*common, "task.vocabulary_size=150", "task.block=40", "trainer.batch=8", "trainer.steps=4"), m=8,
                scratch_m=4, scratch_every=3, seeds=2, scratch_arms=("favorp", "favorpp", "exact"))
    return replace(SMALL, kinds=kinds, glue=glue, ms=(8, 4), pairs=2, other_pairs=1, steps=(2, 4), captures=1,
                   costs=least, heads=least, error=least, points=least, workers=1)


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    for part, lines in {"train": 300, "valid": 290, "test": 280}.items():
        write_text(tmp_path / "data" / "wikitext2" / f"wiki.{part}.tokens", lines)
    for name, folder in (("sst2", "SST-2"), ("stsb", "STS-B")):
        write_glue(tmp_path / "data" / "glue" / folder, name)
    return tmp_path


@pytest.mark.slow
def test_a_whole_report(somewhere, monkeypatch, capsys):
    """The second call computes nothing; step 0 is what the run itself would find; answers have the recorded score."""
    setting = tiny(-1.0)
    monkeypatch.setitem(table2.SETTINGS, "small", setting)
    table2.main("small")
    lines = (somewhere / "outputs/table2/cells.jsonl").read_text().splitlines()
    text = (somewhere / "report" / "table2.md").read_text()
    assert "## Encoders of word pieces" in text and "| exact encoder, FAVOR++, m = 8 |" in text
    assert "power" in text and "nats above FAVOR++" in capsys.readouterr().out
    cells = [json.loads(line) for line in lines]
    for each in cells:
        if each["by"].endswith(".fine_tune"):
            data = next(o for o in each["key"]["overrides"] if o.startswith("task.dataset=")).split("=")[1]
            labels = table2_glue.controls(data)["labels"]
            assert table2_glue.score(data, each["value"]["answers"], labels) == pytest.approx(100 *
                                                                                              each["value"]["score"])
    kind, arm = setting.kinds[0], Arm("favorpp", 8)
    given = [o for o in table2_runs.uptraining_of(kind, arm, 1, setting) if not o.startswith("trainer.steps")]
    run = runs.run([*given, "trainer.steps=0", f"task.model={setting.start(kind, 1)}"], somewhere / "alone")
    key = table2_runs.swapping(setting, [kind])[kind.title, arm, 1]
    assert next(c["value"] for c in cells if c["key"] == key) == pytest.approx(run[-1]["loss"], rel=1e-5)
    words = (somewhere / table2_runs.vocabulary_folder(20) / "vocab.txt").read_text().split("\n")
    assert len(words) == 5 + 2 * 20 + 1 and all(len(word.removeprefix("##")) <= 1 for word in words[5:])
    table2.main("small")
    assert len((somewhere / "outputs/table2/cells.jsonl").read_text().splitlines()) == len(lines)


@pytest.mark.slow
def test_encoders_that_cannot_tell_stop_the_report(somewhere, monkeypatch):
    monkeypatch.setitem(table2.SETTINGS, "small", tiny(100.0))
    with pytest.raises(GateFailed, match="characters: what uniform attention costs .*at least 100.*word pieces"):
        table2.main("small")
    assert not any(each["by"].endswith((".after_swap", ".uptrain")) for each in
                   map(json.loads, (somewhere / "outputs/table2/cells.jsonl").open()))
    assert "**No encoder can tell" in (somewhere / "report" / "table2.md").read_text()


def test_texts_are_written_again_where_they_differ(tmp_path):
    path = table2_encoders.written(tmp_path / "a" / "b.txt", "one")
    before = path.stat().st_mtime_ns
    assert table2_encoders.written(path, "one").stat().st_mtime_ns == before
    assert table2_encoders.written(path, "two").read_text() == "two" and len(list(path.parent.iterdir())) == 1


def test_controls_are_arms():
    for kind in SMALL.kinds:
        assert {EXACT, UNIFORM, kind.near} < set(kind.swapped(SMALL.ms)) >= set(SMALL.uptrained(kind))
