"""make proteins-long: what it measures, and that its verdicts follow it."""

import os
from pathlib import Path

import pytest
import torch

from crt_exp.report import protein_steps, proteins_long, proteins_long_page, writing
from crt_exp.report.protein_steps import FORMED, LAYER, MODEL, WIDE
from crt_exp.report.proteins_long_page import Found
from crt_exp.runner.command_line import check_command_line

PROTEINS = Path(os.environ.get("CRT_DATA", "none")) / "protein"
NOISE = (0.98, 1.0, 1.01, 0.99, 1.02, 1.0)


def found(exact=6.0, long=1.0, late=1.0, uniform=0.0):
    """Results in which exact attention takes `exact` times as long at 8192 letters, FAVOR++ `long` times as long at the
    longest rows and `late` times for a late letter, and uniform attention ends `uniform` nats off."""
    turned = lambda i, scale: [scale * e for e in NOISE[i:] + NOISE[:i]]
    parts = [(part, n) for part in (LAYER, MODEL) for n in (1024, 8192, 32768)] + [(WIDE, 8192)]
    times = {(part, n): {"exact": turned(0, exact * n / 8192), "favorpp": turned(1, 1.0), "uniform": turned(2, 0.5)}
             for part, n in parts}
    loss = lambda name, seed: 2.9 + 0.001 * seed**2 + uniform * (name == "uniform") * (1 + seed / 9)
    test = lambda name, seed: {"step": 2, "loss": loss(name, seed), "accuracy": 0.1 + 0.001 * seed,
                               "unigram_perplexity": 18.0}
    trained = {(name, seed): {"curve": [[1, 3.3], [2, 2.9]], "last": test(name, seed)}
               for name in proteins_long.TRAINED for seed in range(3)}
    trained["relu", 2] = {"diverged": "step 1"}
    memory = {(name, n): float(n) for name, lengths in proteins_long.MEMORY.items() for n in lengths}
    drawn = {(name, n): turned(n % 3, late if n == 8000 else 1.0) for name in ("exact", "favorpp") for n in (100, 8000)}
    flat = {1024: turned(0, 1.0), 8192: turned(1, 1.0), 32768: turned(2, long)}
    return Found(trained, times, flat, memory, drawn, processes=3)


@pytest.mark.parametrize("results, word", [(found(), "holds"), (found(exact=2.0, long=1.5, late=1.5), "fails")],
                         ids=["reached", "missed"])
def test_verdicts_follow_the_times(results, word, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    proteins_long_page.write("small", results, "Facts.", 1.0)
    told = capsys.readouterr().out
    assert [line.split("**")[1] for line in told.splitlines() if line.startswith("- ")] == 5 * [word]
    text = (tmp_path / "proteins-long.md").read_text()
    assert "| wide model, 8192 |" in text and f"| {FORMED} |" in text and "| ReLU |" in text
    assert (tmp_path / "proteins-long.png").stat().st_size > 30_000
    assert (tmp_path / "proteins-long.csv").read_text().count("diverged") == 1


def test_the_first_lines_tell_which_arms_lose_to_a_control():
    results = found(uniform=-0.01)
    results.trained["exact", 0]["last"]["unigram_perplexity"] = 1.0
    text = proteins_long_page.controls_that_win(results)
    assert text.startswith("**Uniform attention, a control, beats 4 of 4 arms.**")
    assert "**The law of letters, by frequency, a control, beats 4 of 4 arms.** proteomes, 2 steps: " in text
    assert proteins_long_page.controls_that_win(found(uniform=1.0)).startswith("None of 4 arms")


def test_times_are_judged_by_process():
    """Rounds of a process are not independent: six rounds of three processes count as three."""
    differences = [claim.difference for claim in proteins_long_page.claims(found())]
    assert [difference.n for difference in differences] == 5 * [3]


def test_curves_that_tell_nothing_are_said_to():
    assert "tell no attention from another" in proteins_long_page.learned(found())
    assert "so that attention matters" in proteins_long_page.learned(found(uniform=0.3))


def test_every_part_steps_with_its_own_attention(one_thread, monkeypatch):
    """Exact attention and that which forms its matrix are the same; no gradient is left behind."""
    monkeypatch.setattr(protein_steps, "A_STEP", 64)
    for part, name in ((LAYER, "favorpp"), (MODEL, "uniform"), (MODEL, FORMED)):
        case = protein_steps.Case(name, 32, protein_steps.rows(part, 32))
        step = case.step(part)
        step()
        left = [t.grad for t in (step.given if part == LAYER else step.model.parameters())]
        assert protein_steps.rows(part, 32) == 2 and not any(grad is not None and grad.any() for grad in left)
    sizes = {"heads": 2, "layers": 1, "d_ff": 8, "d": 16}
    one, two, other = (protein_steps.language_model(name, 32, sizes, 4)(protein_steps.drawn(1, 32))
                       for name in ("exact", FORMED, "uniform"))
    assert torch.allclose(one, two, atol=1e-5) and not torch.allclose(one, other, atol=1e-5)


def test_letters_are_drawn_at_their_positions(one_thread):
    sizes = {"heads": 2, "layers": 1, "d_ff": 8, "d": 16}
    found = protein_steps.generation(["exact", "favorpp"], [5, 20], 3, sizes, 4)
    assert [len(values) for values in found] == 4 * [3]


@pytest.mark.parametrize("size", ["small", *(pytest.param(size, marks=pytest.mark.slow) for size in ("gpu", "full"))])
def test_every_run_is_a_command_line(size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    keys = [proteins_long.training(name, 0, proteins_long.SETTINGS[size]) for name in proteins_long.TRAINED]
    assert len(set(map(str, keys))) == len(keys)
    for key in keys:
        check_command_line([*key["overrides"], "logger=none", "hydra.run.dir=run"])


@pytest.mark.slow
@pytest.mark.skipif(not PROTEINS.is_dir(), reason="needs $CRT_DATA/protein")
def test_all_of_it_at_a_tiny_size(tmp_path, monkeypatch, capsys, one_thread):
    """The real measurement on short chains; memory comes from processes of its own. Again, it computes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = proteins_long.SETTINGS["small"]
    options = ("task.max_length=128", "task.validation_share=0.001", "task.test_share=0.001", "trainer.eval_batch=100")
    of_other = [o for o in small.options if not any(o.split("=")[0] == p.split("=")[0] for p in options)]
    monkeypatch.setitem(proteins_long.SETTINGS, "small", proteins_long.Setting((*of_other, *options), 3, 8, 1, 2))
    for name, value in {"LENGTHS": (64, 128), "LONG": 128, "MEMORY": {"exact": (64, 128), FORMED: (64,)},
                        "POSITIONS": (8, 40), "LETTERS_DRAWN": 4, "FLAT_ROUNDS": 2, "PROCESSES": 2,
                        "TRAINED": ("exact", "favorpp", "uniform")}.items():
        monkeypatch.setattr(proteins_long, name, value)
    monkeypatch.setattr(proteins_long, "DRAWING", proteins_long.DRAWING | {"sizes": protein_steps.SIZES[MODEL], "m": 8})
    monkeypatch.setattr(proteins_long_page, "LONG", 128)
    monkeypatch.setattr(protein_steps, "A_STEP", 256)
    proteins_long.main("small")
    text = (tmp_path / "report/proteins-long.md").read_text()
    assert text.count("at 128 letters: ") == 3 and "| FAVOR++ |" in text
    cells = {path.parent.name: path.read_text() for path in (tmp_path / "outputs").glob("*/cells.jsonl")}
    assert cells.keys() == {"proteins-long", "proteins-long-times"}
    proteins_long.main("small")
    assert cells == {path.parent.name: path.read_text() for path in (tmp_path / "outputs").glob("*/cells.jsonl")}
    assert capsys.readouterr().out.count("written:") == 2
