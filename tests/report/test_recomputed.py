"""A reader's check: verdicts of every page recomputed from its draws, by code that shares nothing with the reports."""

import csv
import gzip
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest
import yaml
from scipy import stats

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.stem for path in (ROOT / "conf/report").glob("*.yaml"))
EACH = 3  # claims of a page


def draws(name):
    plain, packed = (ROOT / f"outputs/report/{name}.csv{end}" for end in ("", ".gz"))
    text = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    return list(csv.DictReader(text.decode().splitlines()))


def by_unit(rows, claim, setting, arm, metric):
    """unit -> {x: values}."""
    units = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if (row["setting"], row["arm"], row["metric"]) == (setting, arm, metric) and (
                claim.get("table") in (None, row["table"])) and allowed(claim.get("x"), row["x"]):
            units[row["unit"]][row["x"]].append(float(row["value"]))
    return units


def allowed(wanted, x):
    places = wanted if isinstance(wanted, list) else [wanted]
    return wanted in (None, "each") or float(x) in map(float, places)


def level(places, shared, log):
    """Of a unit, over the places that both arms have."""
    values = [value for x, each in places.items() if x in shared for value in each]
    return mean(map(math.log, values)) if log else mean(values)


def differences(rows, claim, spec, setting):
    metric = claim.get("metric") or spec.get("main") or next(iter(spec["metrics"]))
    how, log = spec["metrics"][metric], claim.get("scale") == "log"
    sign, scale = (-1 if how.get("better") == "lower" else 1), how.get("scale", 1)
    arms = (claim["better"], claim["worse"]) if "better" in claim else (claim.get("against"), claim["arm"])
    sides = [by_unit(rows, claim, setting, arm, metric) for arm in arms]
    if arms[0] is None:
        return [claim["at_most"] - scale * level(places, places, False) for places in sides[1].values()]
    shared = [{x for places in side.values() for x in places} for side in sides]
    shared = shared[0] & shared[1]
    pairs = [[level(side[unit], shared, log) for side in sides] for unit in sides[0] if unit in sides[1]]
    gains = [sign * (1 if log else scale) * (first - second) for first, second in pairs]
    if "at_most" in claim:
        return [claim["at_most"] - gain for gain in gains]
    margin = claim.get("margin", 0)
    return [gain - (math.log(margin) if log and margin else margin) for gain in gains]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_verdicts_follow_from_the_draws(name):
    spec, rows = yaml.safe_load((ROOT / f"conf/report/{name}.yaml").read_text()), draws(name)
    with (ROOT / "outputs/report/index.csv").open(newline="") as file:
        said = {row["claim"]: row for row in csv.DictReader(file) if row["report"] == name}
    checked = 0
    entries = [entry for entry in [*spec.get("claims", []), *spec.get("bars", [])]
               if entry.get("x") != "each" and not {"verdict", "not here"} & {*entry}]
    for claim in entries[:EACH]:
        for setting in claim.get("settings") or dict.fromkeys(row["setting"] for row in rows):
            verdict = said.get(claim["text"].format(setting=setting, x=claim.get("x")))
            values = differences(rows, claim, spec, setting)
            if verdict is None or len(values) < 2:
                continue
            half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
            assert math.isclose(mean(values), float(verdict["difference"]), rel_tol=1e-6, abs_tol=1e-9)
            assert math.isclose(half, float(verdict["difference_ci95"]), rel_tol=1e-6, abs_tol=1e-9)
            p = min(1.0, float(stats.ttest_1samp(values, 0).pvalue)) if half > 0 else float(mean(values) == 0)
            if verdict["p_holm"]:                       # Holm's correction only raises it
                assert float(verdict["p_holm"]) >= p * (1 - 1e-6)
                word = "cannot tell here" if float(verdict["p_holm"]) > 0.05 else ["fails", "holds"][mean(values) > 0]
                assert verdict["verdict"] in (word, "conflict")
            checked += 1
    assert checked >= min(EACH, len(entries))
