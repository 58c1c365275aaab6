"""make lra, pixels and books: their arms are command lines and pairs, and their verdicts follow the records."""

import base64
import io
import itertools

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image
from small_images import write_images

from crt_exp.report import books, long_runs, lra, pixels, pixels_drawn, writing
from crt_exp.report.evidence import Unjudged
from crt_exp.report.long_page import name_points
from crt_exp.report.long_runs import CONTROLS, Setting, keys_of
from crt_exp.runner.command_line import check_command_line

REPORTS = {"lra": lra, "pixels": pixels, "books": books}


@pytest.mark.parametrize("size", ["small", *(pytest.param(size, marks=pytest.mark.slow) for size in ("gpu", "full"))])
@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.slow
def test_every_run_is_a_command_line(name, size):
    setting = REPORTS[name].SETTINGS[size]
    seen = {arm: key["overrides"] for (which, arm, seed), key in keys_of(setting).items() if not seed}
    for overrides in seen.values():
        assert len({option.split("=")[0] for option in overrides}) == len(overrides)
        check_command_line([*overrides, "logger=none", "hydra.run.dir=run"])
    assert {"exact", *CONTROLS} <= seen.keys()


def test_arms_of_a_seed_differ_in_their_attention_alone():
    setting = lra.SETTINGS["small"]
    keys = keys_of(setting)
    of = lambda arm: set(keys["ListOps", arm, 1]["overrides"]) - set(setting.arms[arm])
    assert len({frozenset(of(arm)) for arm in setting.arms}) == 1
    moved = keys_of(books.SETTINGS["small"])
    a, b = (set(moved["WikiText-2", arm, 2]["overrides"]) for arm in ("favorp, moved", "favorp, redrawn"))
    assert a ^ b == {"attention.redraw_every=20"} and any(option.startswith("task.init=") for option in a)


def found(report, better, uniform):
    """Runs in which the arm that each claim of the paper puts first is `better`, and uniform attention is worse."""
    setting, page = report.SETTINGS["small"], report.PAGE
    found = {}
    for which, arm, seed in keys_of(setting):
        rng = np.random.default_rng([seed, len(arm)])
        places = ["favor, moved", "favorp, moved", "favorp, redrawn", "smreg, redrawn", "favorpp, redrawn",
                  "exact, moved", "favorsharp, redrawn", "nearfar, moved", "nearfar", "linformer", "reformer", "window",
                  "favorp", "favorpp", "relu", "smreg", "elu", "exact"]
        level = better * places.index(arm) if arm in places else -uniform
        value = (0.5 + page.sign * level + 0.01 * seed + 1e-4 * rng.normal()) / page.scale
        metrics = {page.metric: value, "loss": value, page.baseline[0]: 1.0,
                   **{f"loss_at_{i}": value for i in range(1, 9)}}
        found[which, arm, seed] = {"curve": [{"step": 5, **metrics}, {"step": 10, **metrics}], "last": metrics}
    return found


@pytest.mark.parametrize("name", REPORTS)
def test_verdicts_follow_the_records(name):
    report = REPORTS[name]
    page, setting = report.PAGE, report.SETTINGS["small"]
    for better, word in ((5.0, "confirmed"), (-5.0, "refuted")):
        runs = found(report, better, 100.0)
        gates = page.gates(runs, setting)
        assert all(gate.passed for gate in gates.values())
        told = {verdict.claim.text.split(": ")[1]: verdict.word for verdict in page.verdicts(runs, gates)}
        assert word in told.values() and len(told) == len(page.claims)
    runs = found(report, 0.0, 0.0)
    verdicts = page.verdicts(runs, page.gates(runs, setting))
    assert verdicts and all(isinstance(verdict, Unjudged) for verdict in verdicts)
    assert any("uniform attention, a control" in line for line in page.controls_that_win(runs, setting))


def test_a_set_must_tell_both_blind_controls_from_exact_attention():
    page, setting = pixels.PAGE, pixels.SETTINGS["small"]
    runs = found(pixels, 5.0, 100.0)
    assert all(gate.passed and "uniform and identity" in gate.text for gate in page.gates(runs, setting).values())
    for which, arm, seed in runs:
        if (which, arm) == ("32 x 32", "identity"):
            runs[which, arm, seed] = runs[which, "exact", seed]
    assert [gate.passed for gate in page.gates(runs, setting).values()] == [True, False]
    first = {place: run for place, run in runs.items() if place[1] in long_runs.GATE_ARMS}
    assert all(gate.passed and "what uniform" in gate.text for gate in page.gates(first, setting).values())


def test_moved_arms_and_the_unigram_have_their_place_in_the_first_lines():
    page, setting = books.PAGE, books.SETTINGS["small"]
    runs = found(books, 5.0, 100.0)
    told = lambda: "".join(page.controls_that_win(runs, setting))
    assert "moved, a control" not in told() and "unigram" not in told()
    for seed in range(setting.seeds):
        runs["WikiText-2", "uniform, moved", seed]["last"]["loss"] = -1e3
    assert "WikiText-2: uniform attention, moved, a control, ends no worse than exact, moved" in told()
    runs["WikiText-2", "exact", 0]["last"]["unigram_loss"] = -1e4
    assert "WikiText-2: the unigram, a control, ends no worse than exact" in told()


def ended(overrides, kept=False):
    """As `train`: uniform attention costs something on ListOps alone."""
    worse = "attention=uniform" in overrides and not any(option.startswith("task.dataset=") for option in overrides)
    return {"curve": [], "last": {"accuracy": 0.3 if worse else 0.5}}


def spent(overrides, what):
    return {"steps_per_s": 1.0, "bytes": 1.0}


def test_arms_are_trained_where_the_gate_is_passed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(long_runs, "train", ended)
    monkeypatch.setattr(long_runs, "cost_of", spent)
    setting = Setting({"ListOps": ("trainer.steps=2",), "Pathfinder": ("task.dataset=pathfinder",)},
                      {name: (f"attention={name}",) for name in ("exact", "uniform", "window")}, {}, seeds=1, workers=1)
    found, costs, _ = long_runs.filled("lra", setting, lra.PAGE.gates)
    trained = {which: {arm for w, arm, _ in found if w == which} for which in setting.sets}
    assert trained == {"ListOps": {*setting.arms}, "Pathfinder": {*long_runs.GATE_ARMS}} and len(costs) == 6
    assert "not trained" in lra.PAGE.section("Pathfinder", setting, {
        place: run | {"last": run["last"] | {"majority_accuracy": 0.5}} for place, run in found.items()}, costs)


def test_pictures_are_shown_as_they_were_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    values = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    assert (pixels_drawn.picture(encoded) == values).all()
    told = pixels_drawn.write("drawn", {"exact": {"samples": [encoded], "completions": 2 * [encoded]}})
    assert "(drawn.png)" in told and (tmp_path / "drawn.png").stat().st_size > 1000


def test_completions_begin_with_images_of_the_test_split(tmp_path, monkeypatch):
    """The files of a folder are named below it: what is drawn from is the image itself, pixel by pixel."""
    write_images(tmp_path / "images/mine", val=4)
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    asked = []

    def draw(options):
        asked.append(Image.open(options.prompt).copy() if options.prompt else None)
        Image.new("RGB", (2, 2)).save(options.output)

    monkeypatch.setattr(pixels_drawn, "draw", draw)
    found = pixels_drawn.drawings(["task=pixels"], "mine")
    assert len(found["samples"]) == 1 and len(found["completions"]) == pixels_drawn.COMPLETED == len(asked[1:])
    held_out = pixels_drawn.images.load("mine")["val"]
    truth = [np.asarray(held_out.read(source)).tolist() for source in held_out.sources]
    assert asked[0] is None and all(np.asarray(image).tolist() in truth for image in asked[1:])


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.slow
def test_page(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report = REPORTS[name]
    setting = report.SETTINGS["small"]
    runs = found(report, 5.0, 100.0)
    first = next(iter(setting.sets)), "reformer" if "reformer" in setting.arms else "window", 0
    runs[first] = {"diverged": "step 3"}
    costs = {(which, arm): {"steps_per_s": 12.0, "bytes": 2**20} for which in setting.sets for arm in setting.arms}
    report.PAGE.write("small", setting, runs, costs, 60.0)
    text = (tmp_path / writing.REPORT / f"{name}.md").read_text()
    diverged = f"1 of {setting.seeds}"
    assert all(words in text for words in ("confirmed", "12.00", diverged, "passed", report.PAGE.baseline[1]))
    assert all(f"## {which}" in text for which in setting.sets) and ("## Read on" in text) == (name == "books")
    assert (tmp_path / writing.REPORT / f"{name}.png").is_file()


def test_names_of_points_that_lie_together_do_not_cover_each_other():
    fig, axes = writing.new_figure(1, 1, squeeze=False)
    ax = axes[0][0]
    ax.set(xlim=(0, 10), ylim=(0, 10))
    name_points(ax, [("FAVOR+", 5, 5, "k"), ("FAVOR++", 5.05, 5, "k"), ("near-far", 5.1, 5.02, "k")])
    fig.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in ax.texts]
    assert len(boxes) == 3 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
