"""make report: the verdicts of all reports."""

import csv

import pytest

from crt_exp.report import index
from crt_exp.report.evidence import Claim, Gate, Unjudged, exactly, independent, judged


def test_every_verdict_is_listed_with_what_it_rests_on(tmp_path, monkeypatch, capsys):
    up, down, flat = (Claim(text, independent(values), "nats") for text, values in
                      (("up|wards", [1, 1.1, 1.2]), ("downwards", [-1, -1.1, -1.2]), ("level", [1, -1, 0.1])))
    reports = {"first": judged([up, down, flat]), "second": [Unjudged(up, Gate("costs", 0.1, 0.5))], "third": [],
               "fourth": judged([Claim("certain", exactly(2.5))])}
    for name in reports:
        (tmp_path / f"{name}.md").write_text(f"# {name}\n\nVersions: torch 2; commit 0123456789ab, tree unchanged.\n")
    monkeypatch.setattr(index, "verdicts", lambda page: [
        {"family": "bars", **{key: str(value) for key, value in verdict.row().items()}}
        for verdict in reports[page.stem]])
    index.main(tmp_path)
    assert ("Own bars and questions: 5 verdicts: 2 holds, 1 fails, 0 conflict, 0 not comparable, 2 cannot tell here, "
            "1 of these because a gate failed.") in capsys.readouterr().out
    text = (tmp_path / "index.md").read_text()
    assert "| [first](first.md) | 1 | 1 | 0 | 0 | 1 | 0123456789ab |" in text
    assert "[index.csv](index.csv)" in text and "up|wards" not in text
    rows = list(csv.DictReader((tmp_path / "index.csv").read_text().splitlines()))
    assert rows[0]["value"] == "+1.1 ± 0.248 nats" and rows[0]["bar"] == "above 0" and rows[-1]["n"] == "3"
    assert "Reports without a verdict: [third](third.md)" in text
    assert (tmp_path / "index.csv").read_text().count("\n") == 1 + 5


def test_no_report_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no report in .*make one first"):
        index.main(tmp_path)
