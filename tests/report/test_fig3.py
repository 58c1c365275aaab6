"""make fig3: every run that it starts is a command line, arms differ in attention alone, verdicts follow records."""

import json
from dataclasses import replace

import numpy as np
import pytest

from crt_exp.report import fig3, speech_runs, speech_text, writing
from crt_exp.report.evidence import GateFailed, Unjudged
from crt_exp.report.speech_runs import Arm
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import encoder_steps


def keys_of(setting):
    """Of all runs that train."""
    return [*speech_runs.checkpoints(setting), *speech_runs.training(setting).values(),
            *speech_runs.sampling(setting).values()]


@pytest.mark.slow
@pytest.mark.parametrize("size", fig3.SETTINGS)
def test_every_run_is_a_command_line(size, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    seen = set()
    for key in keys_of(fig3.SETTINGS[size]):
        shape = tuple(o if o.startswith("attention=") else o.split("=")[0] for o in key["overrides"])
        if shape not in seen:
            seen.add(shape)
            start = [f"task.init={speech_runs.place(key['start'])}"] if "start" in key else []
            check_command_line([*key["overrides"], *start, "resume=auto", "logger=none", "hydra.run.dir=run"])
    assert len(seen) > 10


def test_arms_of_a_seed_differ_in_attention_alone():
    setting = fig3.SETTINGS["small"]
    keys = speech_runs.training(setting)
    for phase, speaker in (("uptrained", None), ("speaker", setting.speaker), ("scratch", None)):
        of_seed = [key for (where, _, seed), key in keys.items() if where == phase and seed == 1]
        own = ("attention", "features.m=")
        shared = {tuple(o for o in key["overrides"] if not o.startswith(own)) for key in of_seed}
        assert len(of_seed) >= 6 and len(shared) == 1 and "seed=1" in shared.pop()
        starts = {tuple(key.get("start", ())) for key in of_seed}
        exact = () if phase == "scratch" else tuple(speech_runs.checkpoint(setting, speaker)["overrides"])
        assert starts == {exact}


def test_no_two_cells_share_a_key():
    """Whatever is computed for it: one key, one value."""
    setting = fig3.SETTINGS["small"]
    groups = [getattr(speech_runs, name)(setting) for name in ("training", "swapping", "looking", "other_swaps",
              "other_looks", "pacing", "sampling")]
    keys = [json.dumps(key) for group in groups for key in group.values()]
    assert len(set(keys)) == len(keys)


# ---- what it says


def found(distance, uniform=60.0, S=10.0, ratio=2.0):
    """All values, FAVOR+ worse than FAVOR++ by `distance` in points of WER and in nats."""
    setting, rng = fig3.SETTINGS["small"], np.random.default_rng(0)
    base = {"exact": 4.0, "uniform": uniform, "identity": uniform, "favorp": 20.0 + distance, "favorpp": 20.0}
    wer = lambda arm: (base.get(arm.attention, 30.0) + 0.3 * rng.normal()) / 100
    metrics = lambda arm: {"wer": wer(arm), "cer": 0.1, "loss": 100 * wer(arm)}
    record = lambda arm: metrics(arm) | {"steps": 50, "seconds": 60.0, "utterances": 300.0,
                                         "losses": [[5, 90.0], [20, 70.0]],
                                         "curve": [[25, wer(arm), 5.0], [50, wer(arm), 4.0]]}
    errors = lambda arm: {"S": [[S] * 4] * 3, "predicted": [[1.0 if arm.attention == "favorpp" else ratio] * 4] * 3,
                          "measured": [0.5] * 3, "uniform": [0.9] * 3}
    noise = (0.98, 1.0, 1.02)
    return speech_text.Found(
        setting, {name: record(Arm("exact")) for name in speech_runs.exact_models(setting)},
        {arm: errors(arm) for arm in speech_runs.looking(setting)},
        {place: {split: metrics(place[0]) for split in ("validation", "test")}
         for place in speech_runs.swapping(setting)},
        {place: errors(place[1]) for place in speech_runs.other_looks(setting)},
        {place: {"test": metrics(place[1])} for place in speech_runs.other_swaps(setting)},
        {place: record(place[1]) for place in speech_runs.training(setting)},
        {arm: {"greedy": 0.1, "beam": 0.5, "training": 0.2} for arm in speech_runs.pacing(setting)},
        {arm: record(arm) for arm in speech_runs.sampling(setting)},
        {n: {method: [(10 * n if method == "exact" else 500) * e for e in noise] for method in encoder_steps.METHODS}
         for n in (10, 600)}, {(n, method): 2.0 * n for n in (10, 600) for method in encoder_steps.METHODS})


@pytest.mark.parametrize("distance, word", [(4.0, "holds"), (-4.0, "fails"), (0.0, "cannot tell here")])
def test_verdicts_follow_the_records(distance, word):
    verdicts = speech_text.verdicts(found(distance))
    assert {v.word for v in verdicts} == {word} and len(verdicts) == 2 * (4 + len(fig3.SETTINGS["small"].others))
    assert "FAVOR++ beats FAVOR+ at m = 8 directly after the swap" in str(verdicts[0])


def test_nothing_is_judged_where_uniform_attention_costs_little():
    values = found(4.0)
    for (phase, arm, _), record in values.trained.items():
        if phase == "scratch" and arm.attention == "uniform":
            record["loss"] = 4.4
    told = {verdict.claim.text: verdict for verdict in speech_text.verdicts(values)}
    left = [text for text, verdict in told.items() if isinstance(verdict, Unjudged)]
    assert len(left) == 2 and all("from scratch" in text for text in left)
    assert "uniform attention costs nats an utterance trained from scratch" in str(told[left[0]])


def test_a_control_that_wins_is_named_first():
    first = speech_text.control_text(found(1.0, uniform=25.0))
    assert first.startswith("**Attention to no query and no key, a control, beats ")
    assert "uniform attention directly after the swap: 7;" in first and "FAVOR++, m" not in first
    assert speech_text.control_text(found(1.0)).startswith("None of")


@pytest.mark.parametrize("change, told", [({"uniform": 4.0}, "costs nats"), ({"S": 2.0}, "share of heads"),
                                          ({"ratio": 1.1}, "predicted error")])
def test_gates_stop_a_setting_that_cannot_tell(change, told):
    def gates(values):
        return speech_text.gates(values.setting, values.looked, values.after)

    assert all(gate.passed for gate in gates(found(1.0)))
    with pytest.raises(GateFailed, match=told):
        fig3.check_gates(gates(found(1.0, **change)))


def test_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    values = found(4.0)
    passed = speech_text.gates(values.setting, values.looked, values.after)
    fig3.write("fig3", "Title", "small", values, passed, 3.0)
    assert "Below 5% within 20 minutes: reached by the exact model" in capsys.readouterr().out
    text = (tmp_path / "fig3.md").read_text()
    assert "far too small to learn" in text and "FAVOR++, m = 16 is faster than exact attention from 600 s on" in text
    assert (tmp_path / "fig3.png").stat().st_size > 20_000 and "p_holm" in (tmp_path / "fig3.csv").read_text()


def test_every_method_of_the_encoder_hears(one_thread, monkeypatch):
    """Each has its own attention in every layer."""
    monkeypatch.setattr(encoder_steps, "SIZES", encoder_steps.SIZES | {"layers": 2, "channels": 8})
    for method, (name, _) in encoder_steps.METHODS.items():
        model = encoder_steps.encoder(method)
        assert sum(hasattr(layer.self_attn, "swapped") for layer in model.layers) == (0 if name == "exact" else 2)
        encoder_steps.hear(model, encoder_steps.audio(1))
    times = encoder_steps.times(1, 2)
    assert {len(each) for each in times.values()} == {2} and list(times) == list(encoder_steps.METHODS)


@pytest.mark.slow
def test_fig3_at_tiny_sizes(monkeypatch, tmp_path, capsys):
    """The real thing, a few steps of each run; the gates are told and, at these sizes, stop nothing."""
    from tests.small_speech import write_digits

    folder = write_digits(tmp_path / "speech/free-spoken-digit-dataset/recordings")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setattr(fig3, "SECONDS", (1,))
    sizes = {"layers": 1, "dim": 8, "ffn": 8, "channels": 2, "predictor": 8, "joiner": 8, "kernel": 3}
    data = ("task.corpus=fsdd", *(f"+task.sizes.{key}={value}" for key, value in sizes.items()),
            "task.strings.train=12", "task.strings.validation=3", "task.strings.test=3",
            "trainer.log_every=1", "trainer.select=last")
    steps = ("trainer.steps=2", "trainer.eval_every=1")
    setting = replace(fig3.SETTINGS["small"], data=data, exact=steps, uptrained=steps, scratch=steps,
                      arms=("favorp", "favorpp", "favorsharp"), plain=("exact", "uniform", "nearfar"), ms=(4,),
                      options=(("nearfar", (("block", 2),)),), swaps=2, pair_swaps=2, seeds=2,
                      scratch_arms=("favorp", "favorpp"), scratch_seeds=2, speaker="bob", speaker_arms=("exact",),
                      others=(("2 heads", ("++task.sizes.heads=2",)),),
                      speaker_seeds=2, sample=(), workers=1)
    assert folder.is_dir()
    with pytest.raises(GateFailed, match="this setting cannot answer"):
        fig3.report("fig3", "Title", setting, "tiny")
    monkeypatch.setattr(fig3, "check_gates", list)
    fig3.report("fig3", "Title", setting, "tiny")
    text = (tmp_path / "report/fig3.md").read_text()
    assert "**failed**" in text and "FAVOR++, m = 4" in text and "of 2 steps" not in text
    runs = [path for path in speech_runs.HOME.path.iterdir() if path.is_dir()]
    assert len(runs) == 3 and all(path.name.startswith("exact-") for path in runs)
