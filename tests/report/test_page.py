"""Pages are functions of committed draws and their file: rendered again they are the same."""

import gzip
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from crt_exp.config import ConfigError
from crt_exp.probes import chosen as choice
from crt_exp.report import __main__ as command_line
from crt_exp.report import draws, figures, page, render, tables
from crt_exp.report.evidence import Bar, Claim, Unjudged, equivalent, independent, judged, signs
from crt_exp.report.page import Page
from crt_exp.probes.cells import Draw

COMMITTED = Path(__file__).parents[2] / "outputs/report"
MEASURED = [name for name in page.names() if draws.there(name, COMMITTED)]
FAST = ("lra", "books", "pixels")
SPEC = {"title": "A page", "metrics": {"loss": {"unit": "nats", "better": "lower", "format": ".2f"}},
        "controls": ["uniform"], "arms": {"exact": "exact", "ours": "ours", "uniform": "uniform"},
        "gates": [{"text": "{setting}: uniform costs", "metric": "loss", "of": "exact", "than": "uniform",
                   "least": 0.5}],
        "claims": [{"text": "{setting}: exact is better", "better": "exact", "worse": "ours"},
                   {"text": "{setting}: ours is at most 1.5", "arm": "ours", "at_most": 1.5}],
        "tables": [{"columns": [{"name": "loss", "metric": "loss"},
                                {"name": "better", "metric": "loss", "against": "exact"}]}],
        "panels": [{"kind": "dots", "metric": "loss"}]}


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


@cache
def committed(name):
    return draws.read(name, COMMITTED)


@pytest.mark.parametrize("name", MEASURED)
def test_files_name_arms_and_measurements_that_exist(name):
    spec = page.load(name)
    frame = committed(name)
    assert {*spec.get("controls", [])} <= {*frame["arm"]}, "a control without draws"
    known = {*frame["arm"], *(arm for size in spec.get("sizes", {}).values() for arm in choice.known(size or {}))}
    for claim in [*spec.get("claims", []), *spec.get("bars", [])]:
        assert {claim[key] for key in ("better", "worse", "arm") if key in claim} <= known, claim["text"]
    assert (frame[["commit", "date"]] != "").all().all()
    assert len(spec.get("claims", [])) <= 5, "more claims of the paper than a page names"


def test_draws_are_of_commits_that_can_be_looked_at():
    """A "+" marks a tree with changes."""
    def git(*args):
        return subprocess.run(["git", "-C", str(COMMITTED), *args], capture_output=True, text=True).stdout.split()

    if git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("no history, as of an archive or a shallow clone")
    short = {digest[:12] for digest in git("rev-list", "HEAD")}
    for name in MEASURED:
        named = {commit.rstrip("+") for commit in committed(name)["commit"] if commit}
        assert named <= short, name


def test_verdicts_are_those_of_the_draws(tmp_path):
    made = a_page(tmp_path, LOSSES)
    gains = np.subtract(LOSSES["ours"], LOSSES["exact"]), 1.5 - np.array(LOSSES["ours"])
    bars = None, Bar(1.5, -1, "at most 1.5", "nats")
    expected = judged([Claim(verdict.claim.text, independent(gain), "nats", bar=bar)
                       for verdict, gain, bar in zip(made.verdicts, gains, bars)])
    assert [str(verdict) for verdict in made.verdicts] == [str(verdict) for verdict in expected]
    assert made.verdicts[0].claim.text == "A: exact is better" and made.verdicts[0].word == "holds"


def test_claims_of_the_paper_and_own_bars_are_judged_and_counted_apart(tmp_path):
    spec = {key: value for key, value in SPEC.items() if key != "gates"} | {
        "claims": [SPEC["claims"][0] | {"paper": "0.3", "why": "Ours is noisy."},
                   {"text": "six layers suffice", "not here": "models are small", "paper": "6 against 12"}],
        "bars": [{"text": "near, {setting}", "better": "exact", "worse": "ours", "equal": 0.5, "scale": "log"},
                 {"text": "mostly", "better": "exact", "worse": "uniform", "test": "sign", "looks": 2}],
        "independence": "the seed", "looks": 2, "choices": ["The rate was tuned with exact attention."]}
    made = a_page(tmp_path, LOSSES, spec)
    gain, log = np.subtract(LOSSES["ours"], LOSSES["exact"]), np.log(LOSSES["ours"]) - np.log(LOSSES["exact"])
    families = made.families
    assert families["claims"][0].p == independent(gain).p and families["claims"][0].level == 0.029
    assert [verdict.claim.difference for verdict in families["bars"]] == [
        equivalent(log, math.log(1.5)), signs(np.subtract(LOSSES["uniform"], LOSSES["exact"]))]
    text = render.text(made, False)
    assert "## The paper's claims: 1 holds, 1 cannot tell here\n" in text
    assert "<summary>Own bars and questions: " in text
    assert "nats (bar: above 0; the paper: 0.3)\n" in text and "| Ours is noisy. |" in text
    assert "six layers suffice (the paper: 6 against 12): not measured here, because models are small" in text
    assert "<summary>Choices</summary>\n\n- The rate was tuned with exact attention.\n- Judged at 0.029" in text
    assert "Unit of independence: the seed." in text
    assert [row["family"] for row in made.rows()] == ["claims", "claims", "bars", "bars"]


def test_a_failed_gate_leaves_claims_unjudged_and_a_control_that_wins_comes_first(tmp_path):
    made = a_page(tmp_path, LOSSES | {"uniform": [1.0, 1.2, 1.2]})
    assert all(isinstance(verdict, Unjudged) for verdict in made.verdicts)
    text = render.text(made, False)
    assert text.splitlines()[2] == "**Uniform, a control, beats 1 of 2 arms.** A: ours."
    assert "- **failed**: A: uniform costs: 0.0333 (at least 0.5)" in text


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


def test_tables_hold_what_the_paper_reports_and_count_units(tmp_path):
    columns = [{"name": "no use", "count": "loss", "no better than": "uniform"},
               {"name": "paper", "paper": {"ours": "1.25"}}]
    made = a_page(tmp_path, LOSSES | {"ours": [2.2, 1.0, 2.4]}, SPEC | {"tables": [{"columns": columns}]})
    assert "| ours | 2 of 3 | 1.25 |" in str(tables.sections(made)[0])


def test_tables_pair_by_unit_and_leave_out_what_is_missing(tmp_path):
    made = a_page(tmp_path, LOSSES | {"ours": [1.3, 1.42], "once": [7.0]})
    text = "\n".join(map(str, tables.sections(made)))
    pair = independent(np.subtract(LOSSES["exact"][:2], [1.3, 1.42]))
    assert f"| ours | 1.36 ± 0.76 | {pair:+.2f} |" in text and "| once | 7.00 | -6.00 |" in text


def test_logarithms_average_geometrically(tmp_path):
    made = a_page(tmp_path, {"ours": [1.0, math.e**2]})
    draws.write("mine", [*rows({"ours": [1.0]}), Draw("A", "ours", "loss", 100.0, 0)], tmp_path)
    assert Page("mine", tmp_path, SPEC).values("loss", log=True).tolist() == pytest.approx([10.0])
    assert made.values("loss", log=True).tolist() == pytest.approx([1.0, math.e**2])


def test_pictures_show_the_draws(tmp_path):
    fig = figures.figure(a_page(tmp_path, LOSSES))
    drawn = sorted(float(line.get_xdata()[0]) for line in fig.axes[0].lines if len(line.get_xdata()) == 1)
    assert set(np.round([np.mean(values) for values in LOSSES.values()], 6)) <= set(np.round(drawn, 6))


def test_pictures_of_differences_are_paired(tmp_path):
    panel = {"kind": "dots", "metric": "loss", "less": "exact"}
    ax = figures.figure(a_page(tmp_path, LOSSES | {"uniform": [2.0]}, SPEC | {"panels": [panel]})).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["uniform", "ours"]
    drawn = [float(line.get_xdata()[0]) for line in ax.lines if len(line.get_xdata()) == 1]
    assert 1.0 in drawn and np.isclose(drawn, np.mean(np.subtract(LOSSES["ours"], LOSSES["exact"]))).any()


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


@pytest.mark.parametrize("text, message", [
    ("title: [", "not valid YAML"), ("- a", "got list, expected keys"), ("titel: a", "unknown key of .* 'titel'"),
    ("title: a", "the key metrics is missing"),
    ("title: a\nmetrics: {}\nclaims: [{text: b, beter: c}]", "unknown key of a claim of .* 'beter'"),
    ("title: a\nmetrics: {}\nclaims: [{text: b}]", "got none of better, arm, verdict, not here"),
    ("title: a\nmetrics: {}\nbars: [{text: b, verdict: maybe}]", "verdict is one of holds, fails"),
    ("title: a\nmetrics: {}\nlooks: 7", "looks: got 7, expected 1, 2, 3")])
def test_bad_files_are_refused(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        page.load(str(path))


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
    assert stop.value.code == 1 and f"crt_exp.report: lra: {tmp_path / 'lra.csv'}: line" in said.err
    assert "not made: lra; nor decide and the index" in said.err and len(said.err.splitlines()) == 2
    assert {path.stem for path in tmp_path.glob("*.md")} == {"books", "pixels"}


SIZED = SPEC | {"facts": "SIZE={size}. Two clusters.", "commands": True, "sizes": {
    size: {"runs": [{"common": ["task=mlm"], "metrics": ["loss"], "arms": ["exact"],
                     "settings": {"A": [f"task.text={text}.txt"]}}]}
    for size, text in {"full": "large", "small": "few"}.items()}}


@pytest.mark.parametrize("size, folder, told, other", [
    ("small", "", ["\n\nSIZE=small. Two clusters.\n", "`make mine`", "few.txt"], "full"),
    ("full", "full", ["SIZE=full: its settings are `sizes: full` of conf/report/mine.yaml", "`make mine SIZE=full`",
                      "large.txt"], "few.txt")])
def test_a_page_names_the_size_that_ran(size, folder, told, other, tmp_path, monkeypatch):
    """And each size has its own folder, so that none is written over the committed page."""
    monkeypatch.setattr(draws, "FOLDER", tmp_path)
    place = page.folder_of(SIZED, size)
    assert place == tmp_path / folder
    place.mkdir(exist_ok=True)
    draws.write("mine", rows(LOSSES), place)
    text = render.text(Page("mine", place, SIZED), False)
    assert all(words in text for words in told) and other not in text
    assert text == render.text(Page("mine", place, SIZED, size=size), False)


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


@pytest.mark.parametrize("name, said", [
    ("books", ["experiment=performers_pg19", "experiment=performers_lm1b", "the run performers_lm1b: exact of"]),
    ("proteins", ["experiment=performers_trembl", "task.dataset=generated"])])
def test_commands_of_another_size_are_those_of_its_runs(name, said):
    """Of all its grids; the text of a file is of the home size."""
    made = Page(name, frame=pd.DataFrame(columns=draws.COLUMNS), size="full")
    text = render.commands(made)
    assert all(word in text for word in said) and "task.vocabulary_size=300" not in text
    assert text.count("A run is `python -m crt_exp") == 2
