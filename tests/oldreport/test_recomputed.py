"""A reader's check: verdicts of every page recomputed from its draws, by code that shares nothing with the reports."""

import csv
import gzip
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev

import pytest
import yaml
from scipy import stats

from crt_exp.oldreport.page import SAFE

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.stem for path in (ROOT / "conf/report").glob("*.yaml")
               if any((ROOT / "outputs/report").glob(f"{path.stem}.csv*")))
EACH = 3  # claims of a page
LEVELS = {1: 0.05, 2: 0.029, 3: 0.022}


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
    return wanted in (None, "each") or any(same(place, x) for place in places)


def same(place, x):
    """Of numbers, or of the names of places."""
    try:
        return float(place) == float(x)
    except ValueError:
        return str(place) == x


def level(places, shared, log):
    """Of a unit, over the places that both arms have."""
    values = [value for x, each in places.items() if x in shared for value in each]
    return mean(map(math.log, values)) if log else mean(values)


def inside(claim, scale, value, log):
    """How far a value, or with log its logarithm, lies on the right side of the claim's bound."""
    bound, side = (claim["at_most"], 1) if "at_most" in claim else (claim["at_least"], -1)
    return side * (math.log(bound / scale) - value if log else bound - scale * value)


def differences(rows, claim, spec, setting):
    metric = claim.get("metric") or spec.get("main") or next(iter(spec["metrics"]))
    how, log = spec["metrics"][metric], claim.get("scale") == "log"
    sign, scale = (-1 if how.get("better") == "lower" else 1), how.get("scale", 1)
    if "keeps" in claim:
        return kept(rows, claim, setting, metric, sign * scale)
    arms = (claim["better"], claim["worse"]) if "better" in claim else (claim.get("against"), claim["arm"])
    sides = [by_unit(rows, claim, setting, arm, metric) for arm in arms]
    if arms[0] is None:
        return [inside(claim, scale, level(places, places, log), log) for places in sides[1].values()]
    shared = [{x for places in side.values() for x in places} for side in sides]
    shared = shared[0] & shared[1]
    pairs = [[level(side[unit], shared, log) for side in sides] for unit in sides[0] if unit in sides[1]]
    gains = [sign * (1 if log else scale) * (first - second) for first, second in pairs]
    if "at_most" in claim:
        return [claim["at_most"] - gain for gain in gains]
    margin = of_setting(claim.get("margin", 0), setting)
    return [gain - (math.log(margin) if log and margin else margin) for gain in gains]


def of_setting(given, setting):
    return given.get(setting, 0) if isinstance(given, dict) else given


def recomputed(values, claim, overlap=None):
    """(difference, half width or None, p-value, whether it is above 0)."""
    if len(values) == 1:
        return values[0], 0.0, 0.0, values[0] > 0
    half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    if claim.get("test") == "sign":
        above, below = (sum(sign * value > 0 for value in values) for sign in (1, -1))
        return median(values), None, stats.binomtest(above, above + below).pvalue, above > below
    if "equal" in claim:
        bound = math.log(1 + claim["equal"]) if claim.get("scale") == "log" else claim["equal"]
        inside = bound - abs(mean(values))
        side = {"alternative": "less" if mean(values) > 0 else "greater"}
        p = stats.ttest_1samp(values, math.copysign(bound, mean(values)), **side).pvalue
        return inside, half, min(p, 1 - p), inside > 0
    if overlap is not None:  # Nadeau and Bengio: splits of one data set
        error = stdev(values) * (1 / len(values) + overlap) ** 0.5
        law = stats.t(len(values) - 1)
        return mean(values), error * law.ppf(0.975), 2 * law.sf(abs(mean(values)) / error), mean(values) > 0
    p = float(stats.ttest_1samp(values, 0).pvalue) if half > 0 else float(mean(values) == 0)
    return mean(values), half, p, mean(values) > 0


def kept(rows, claim, setting, metric, scale):
    """How much more than its share of what `of` gains over `over` the arm gains over it."""
    places = [(claim[key], claim.get(place, claim.get("x")))
              for key, place in (("arm", "x"), ("of", "of_x"), ("over", "over_x"))]
    ours, whole, none = ({unit: mean(value for values in each.values() for value in values) for unit, each in by_unit(
        rows, claim | {"x": x}, setting, arm, metric).items()} for arm, x in places)
    return [scale * (ours[unit] - none[unit] - claim["keeps"] * (whole[unit] - none[unit]))
            for unit in ours if unit in none and unit in whole]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_verdicts_follow_from_the_draws(name):
    spec, rows = yaml.load((ROOT / f"conf/report/{name}.yaml").read_text(), SAFE), draws(name)
    with (ROOT / "outputs/report/index.csv").open(newline="") as file:
        said = {row["claim"]: row for row in csv.DictReader(file) if row["report"] == name}
    checked, without = 0, 0
    entries = [entry for entry in [*spec.get("claims", []), *spec.get("bars", [])]
               if entry.get("x") != "each" and not {"verdict", "not here"} & {*entry}]
    for claim in entries[:EACH]:
        settings = claim.get("settings") or [*dict.fromkeys(row["setting"] for row in rows)]
        without += not any(differences(rows, claim, spec, setting) for setting in settings)      # of what has no draws
        for setting in settings:
            verdict = said.get(claim["text"].format(setting=setting, x=claim.get("x"),
                                                    margin=of_setting(claim.get("margin", 0), setting)))
            if verdict is not None and verdict["n"] == "1":  # one unit, which no verdict can rest on
                assert verdict["verdict"] == "cannot tell here"
                checked += 1
                continue
            values = differences(rows, claim, spec, setting)
            if verdict is None or not values:
                continue
            difference, half, p, above = recomputed(values, claim, spec.get("overlap"))
            assert math.isclose(difference, float(verdict["difference"]), rel_tol=1e-6, abs_tol=1e-9)
            if half is not None:
                assert math.isclose(half, float(verdict["difference_ci95"]), rel_tol=1e-6, abs_tol=1e-9)
            if verdict["p_holm"]:                       # Holm's correction only raises it
                assert float(verdict["p_holm"]) >= min(p, 1.0) * (1 - 1e-6)
                level = LEVELS[claim.get("looks", spec.get("looks", 1))]
                word = "cannot tell here" if float(verdict["p_holm"]) > level else ["fails", "holds"][above]
                assert verdict["verdict"] in (word, "conflict")
            checked += 1
    assert checked >= min(EACH, len(entries)) - without
