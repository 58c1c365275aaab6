"""proteins at a tiny size: every arm has draws, every claim is judged."""

import pytest

from crt_exp.report import draws, page, render
from crt_exp.report.page import Page
from crt_exp.studies import training

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
