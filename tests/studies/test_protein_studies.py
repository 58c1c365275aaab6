"""proteins and redraw at tiny sizes: every arm has draws, every claim is judged."""

import pytest

from crt_exp.report import draws, page, render
from crt_exp.report.page import Page
from crt_exp.studies import redraw, training

SIZES = ["+task.sizes.heads=2", "+task.sizes.layers=1", "+task.sizes.d_ff=16", "+task.sizes.d=16"]
TINY = {"common": ["task=trembl", *SIZES, "task.generated.sequences=60", "task.validation_share=0.2",
                   "task.test_share=0.2", "trainer.batch=4", "trainer.steps=2", "trainer.eval_every=1",
                   "trainer.select=last", "task.max_length=24", "task.generated.shortest=8",
                   "task.generated.longest=24"], "seeds": 2, "workers": 1, "least": -9.0}


def tiny(name, **more):
    """The small size of a page on its generated families, in few steps."""
    size = page.load(name)["sizes"]["small"] | TINY | more
    ways = {"U": "unidirectional", "B": "bidirectional"}
    return size | {"settings": {f"generated families, {key}": [f"task.direction={way}"] for key, way in ways.items()},
                   "only": {setting: arms for setting, arms in size.get("only", {}).items() if "gen" in setting}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:causal OPRF attention has no statistics yet")   # in so few steps
def test_a_page_of_tiny_runs(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    size = tiny("proteins")
    draws.write("proteins", training.measure("proteins", ["tasks/trembl.py"], size), tmp_path)
    made = Page("proteins", tmp_path)
    for setting in ("generated families, U", "generated families, B"):
        here = {*made.draws[made.draws["setting"] == setting]["arm"]}
        assert here >= {*size["only"].get(setting, size["arms"]), "empirical baseline"}
    assert len(made.families["claims"]) == 2 * 4 + 1 and "| exact |" in render.text(made, False)
    assert {"generated families, U, held out", "generated families, B, held out"} < {*made.settings}


@pytest.mark.slow
def test_exact_models_swapped_and_trained_on(tmp_path, monkeypatch, one_thread):
    """Step 0 of an arm that trains on is the swap with its noise; nothing is computed twice."""
    monkeypatch.chdir(tmp_path)
    arms = {"exact": "exact", "uniform": "uniform", "favorp": "favorp m=4", "favorpp": "favorpp m=4"}
    later = {f"{arm}{how}": [f"attention={arm}", *([] if "f" not in arm[:1] else ["features.m=4"])]
             for arm, how in (("exact", ", trained on"), ("favorp", ""))}
    size = tiny("redraw", swapped=arms, moved=later, noises=2, batches=1, projections=4, then={})
    size["settings"].pop("generated families, B")
    made = [*redraw.measure("redraw", ["tasks/trembl.py"], size)]
    swaps = [draw for draw in made if draw.table == "swap" and draw.metric == "loss"]
    assert [sum(draw.arm == arm for draw in swaps) for arm in arms] == [2, 2, 4, 4]
    curve = [draw for draw in made if draw.table == "validation" and draw.metric == "loss" and draw.unit == 1]
    assert [(draw.arm, draw.x) for draw in curve] == [(arm, x) for arm in later for x in (1, 2, 0)]
    layers = {(draw.arm, draw.metric) for draw in made if draw.table == "layers"}
    assert {("favorp", "predicted_error"), ("favorpp", "measured_error"), ("exact", "square_sum")} < layers
    draws.write("redraw", made, tmp_path)
    assert "| FAVOR+ |" in render.text(Page("redraw", tmp_path), False)
    assert [*redraw.measure("redraw", ["tasks/trembl.py"], size)] == made
