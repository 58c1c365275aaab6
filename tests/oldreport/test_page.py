"""Pages are functions of committed draws and their file: rendered again they are the same."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from crt_exp.config import ConfigError
from crt_exp.measure.cells import Draw
from crt_exp.oldreport import __main__ as command_line
from crt_exp.oldreport import draws, page, render
from crt_exp.oldreport.evidence import Bar, Claim, Unjudged, independent, judged
from crt_exp.oldreport.page import Page

COMMITTED = Path(__file__).parents[2] / "outputs/report"
MEASURED = [name for name in page.names() if draws.there(name, COMMITTED)]
FAST = ("lra", "books", "pixels")
SPEC = {"title": "A page", "metrics": {"loss": {"unit": "nats", "better": "lower", "format": ".2f"}},
        "gates": [{"text": "{setting}: uniform costs", "metric": "loss", "of": "exact", "than": "uniform",
                   "least": 0.5}],
        "claims": [{"text": "{setting}: exact is better", "better": "exact", "worse": "ours"},
                   {"text": "{setting}: ours is at most 1.5", "arm": "ours", "at_most": 1.5}]}


def without_age(text):
    return "\n".join(line for line in text.splitlines() if not line.startswith(render.CODE))


def rows(losses, setting="A"):
    return [Draw(setting, arm, "loss", value, unit) for arm, values in losses.items()
            for unit, value in enumerate(values)]


def a_page(tmp_path, losses, spec=SPEC):
    draws.write("mine", rows(losses), tmp_path)
    return Page("mine", tmp_path, spec)


LOSSES = {"exact": [1.0, 1.1, 1.2], "ours": [1.3, 1.42, 1.5], "uniform": [2.0, 2.1, 2.3]}


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
                                  for name in MEASURED])
def test_committed_pages_are_those_of_their_draws(name):
    made = Page(name, COMMITTED)
    text = render.text(made, (COMMITTED / f"{name}.png").is_file())
    assert without_age(text) == without_age((COMMITTED / f"{name}.md").read_text()), f"make {name}, or make report"


def test_draws_are_of_commits_that_can_be_looked_at():
    """A "+" marks a tree with changes."""
    def git(*args):
        return subprocess.run(["git", "-C", str(COMMITTED), *args], capture_output=True, text=True).stdout.split()

    if git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("no history, as of an archive or a shallow clone")
    short = {digest[:12] for digest in git("rev-list", "HEAD")}
    for name in MEASURED:
        named = {commit.rstrip("+") for commit in draws.read(name, COMMITTED)["commit"] if commit}
        assert named <= short, name


def test_verdicts_are_those_of_the_draws(tmp_path):
    made = a_page(tmp_path, LOSSES)
    gains = np.subtract(LOSSES["ours"], LOSSES["exact"]), 1.5 - np.array(LOSSES["ours"])
    bars = None, Bar(1.5, -1, "at most 1.5", "nats")
    expected = judged([Claim(verdict.claim.text, independent(gain), "nats", bar=bar)
                       for verdict, gain, bar in zip(made.verdicts, gains, bars)])
    assert [str(verdict) for verdict in made.verdicts] == [str(verdict) for verdict in expected]
    assert made.verdicts[0].claim.text == "A: exact is better" and made.verdicts[0].word == "holds"


def test_a_part_of_a_page_judges_nothing(tmp_path):
    """Its claims and their correction are those of the whole."""
    whole = a_page(tmp_path, LOSSES)
    part = render.text(Page("mine", tmp_path, SPEC, part='ARMS="exact ours"'), False)
    assert "**holds**" in render.text(whole, False) and "A part of the page" in part
    assert not any(word in part for word in ("holds", "fails", "cannot tell", "passed", "a control"))


def test_a_failed_gate_leaves_claims_unjudged(tmp_path):
    made = a_page(tmp_path, LOSSES | {"uniform": [1.0, 1.2, 1.2]})
    assert all(isinstance(verdict, Unjudged) for verdict in made.verdicts)


def test_an_approximation_keeps_a_share_of_what_exact_attention_gains(tmp_path):
    claim = {"text": "keeps", "arm": "ours", "keeps": 0.5, "of": "exact", "over": "uniform"}
    left = [(u - o) - 0.5 * (u - e) for e, o, u in zip(*LOSSES.values())]
    made = a_page(tmp_path, LOSSES, SPEC | {"claims": [claim]})
    assert made.verdicts[0].claim.difference == pytest.approx(independent(left))
    later = [Draw("A", "ours", "loss", value, unit, x) for x, values in ((0, [2.0, 2.1]), (9, [1.4, 1.5]))
             for unit, value in enumerate(values)]
    draws.write("mine", [*rows({"exact": [1.0, 1.1]}), *later], tmp_path)
    places = claim | {"over": "ours", "x": 9, "over_x": 0, "of_x": None}
    made = Page("mine", tmp_path, {key: SPEC[key] for key in ("title", "metrics")} | {"claims": [places]})
    assert made.verdicts[0].claim.difference.mean == pytest.approx(0.1)


def test_draws_are_read_as_they_were_written(tmp_path):
    made = [Draw("A", "exact", "outcome", "refused", "model", table="t", seconds=1.5, commit="abc"),
            Draw("A", "exact", "outcome", "exact", "other", x=3)]
    draws.write("mine", made, tmp_path)
    frame = draws.read("mine", tmp_path)
    assert frame["value"].tolist() == ["refused", "exact"] and frame["seconds"].tolist() == [1.5, 0.0]
    assert pd.isna(frame["x"][0]) and frame["x"][1] == 3
    many = [Draw("A", "exact", "loss", i / 7, i) for i in range(60_000)]
    assert draws.write("mine", many, tmp_path).name == "mine.csv.gz" and not (tmp_path / "mine.csv").exists()
    assert draws.read("mine", tmp_path)["value"].tolist() == [i / 7 for i in range(60_000)]


WHOLE = pd.DataFrame([vars(Draw("A", "exact", "loss", i / 7, i)) for i in range(30)]).to_csv(index=False)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("content, words", [
    ("", "it is empty"), (WHOLE.splitlines()[0] + "\n", "it holds no draws"),
    (WHOLE[:-1], "line 31, the last, has no end"), (WHOLE[:-8], "line 31"), (WHOLE[:700], "line"),
    (WHOLE.replace(",3,,", ",3\n", 1), "line 5 has 5 fields"), (WHOLE.replace("A,exact", 'A,"exact', 1), "is not csv"),
    (WHOLE + "A,exact\n", "line 32 has 2 fields, the first line 11")])
def test_draws_that_are_cut_are_refused(packed, content, words, tmp_path):
    path = tmp_path / ("mine.csv.gz" if packed else "mine.csv")
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    with pytest.raises(ValueError) as error:
        draws.read("mine", tmp_path)
    assert f"{path}: " in str(error.value) and words in str(error.value) and "`make mine`" in str(error.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_half_written_gz_is_refused(share, tmp_path):
    content = gzip.compress(WHOLE.encode())
    (tmp_path / "mine.csv.gz").write_bytes(content[:int(share * len(content))])
    with pytest.raises(ValueError, match="mine.csv.gz: cut off or damaged"):
        draws.read("mine", tmp_path)


def test_the_other_pages_are_made_where_draws_are_cut(tmp_path, monkeypatch, capsys):
    for name in ("books", "lra", "pixels"):
        (tmp_path / f"{name}.csv").write_bytes((COMMITTED / f"{name}.csv").read_bytes())
    (tmp_path / "lra.csv").write_bytes((COMMITTED / "lra.csv").read_bytes()[:5000])
    monkeypatch.setattr(page, "names", lambda: ["books", "lra", "pixels"])
    monkeypatch.setattr(render, "save_figure", lambda figure, path: None)
    monkeypatch.setattr(sys, "argv", ["report", "--all", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    said = capsys.readouterr()
    assert stop.value.code == 1 and f"crt_exp.oldreport: lra: {tmp_path / 'lra.csv'}: line" in said.err
    assert "not made: lra; nor decide and the index" in said.err and len(said.err.splitlines()) == 2
    assert {path.stem for path in tmp_path.glob("*.md")} == {"books", "pixels"}


def test_another_size_is_not_written_over_the_committed_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", "table1", "--size", "full", "--out", str(draws.FOLDER)])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 2 and "holds the page of SIZE=small: leave --out out, then SIZE=full goes to " in \
        capsys.readouterr().err


def test_missing_or_foreign_draws_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no draws of this page; `make lra` measures them"):
        Page("lra", tmp_path)
    (tmp_path / "lra.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="got the columns a, b, expected setting, arm"):
        Page("lra", tmp_path)
    with pytest.raises(ValueError, match="no draws, so nothing is written"):
        draws.write("mine", [], tmp_path)
    with pytest.raises(ConfigError, match="unknown report 'lrb'; did you mean lra"):
        page.load("lrb")
