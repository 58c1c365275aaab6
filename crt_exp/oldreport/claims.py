"""The entries of `claims` and `bars` of a page's file, as differences of its draws.

An entry is {text, better, worse}, which compares two arms; {text, arm, at_most or at_least}, an arm with a number in
shown units, or, with `against`, by how much it is worse than that arm; {text, arm, keeps, of, over}, how much more than
the share `keeps` of what `of` gains over `over` the arm gains over it; {text, verdict: not comparable, why} or
{text, not here: reason}, for what a paper says and the draws cannot judge. Further keys:

    metric, settings, table     default: `main` of the page, all settings, all tables
    x                           a place or a list of them; each: one claim for every x; the text may name
                                {setting}, {x} and {margin}
    of_x, over_x                the places of the arms `of` and `over`, default: x
    scale: log                  compares logarithms
    margin                      by how much better, at least; with scale: log a factor; or setting -> number
    closed                      the metric of the closed form that the verdict must not contradict
    test: sign                  the sign test over units, for heavy tails
    equal                       two one-sided tests that better and worse are within this of each other; with
                                scale: log 0.25 stands for 25%
    looks                       at the draws before the verdict, default: those of the page
    paper, why                  the paper's number or words, and one sentence; a string, or setting -> string
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.config import ConfigError, unknown
from crt_exp.oldreport.evidence import (
    WORDS,
    Bar,
    Claim,
    Interval,
    Share,
    Unmeasured,
    equivalent,
    exactly,
    inside,
    signs,
)

Page = Any  # that of report/page.py, which stands above

KEYS = ("text", "better", "worse", "arm", "at_most", "at_least", "against", "keeps", "of", "over", "of_x",
        "over_x", "metric", "settings", "table", "x", "scale",
        "margin", "closed", "test", "equal", "looks", "paper", "why", "verdict", "not here")


def checked(entries: Sequence[dict[str, Any]], path: Any) -> None:
    """Raises ConfigError for an entry without text, with an unknown key, or that says in two ways what it compares."""
    for entry in entries:
        for key in entry:
            if key not in KEYS:
                raise unknown(f"key of a claim of {path}", key, KEYS)
        ways = [key for key in ("better", "arm", "verdict", "not here") if key in entry]
        if "text" not in entry or len(ways) != 1:
            raise ConfigError(f"{path}: the claim {entry.get('text', entry)}: got {', '.join(ways) or 'none'} of "
                              "better, arm, verdict, not here, expected text and one of these")
        if entry.get("verdict", WORDS[0]) not in WORDS or entry.get("test", "sign") != "sign":
            raise ConfigError(f"{path}: the claim {entry['text']}: verdict is one of {', '.join(WORDS)}; test is sign")


def entry_claims(page: "Page", entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Claim | Unmeasured]]:
    """(setting, claim) of each entry, setting and place."""
    for entry in entries:
        if "verdict" in entry or "not here" in entry:
            word = entry.get("verdict", "cannot tell here")
            reason = entry.get("why", "") if "verdict" in entry else f"not measured here, because {entry['not here']}"
            yield "", Unmeasured(entry["text"], word, reason, str(entry.get("paper", "")))
            continue
        for setting in entry.get("settings") or page.settings:
            for x in places(page, entry, setting):
                yield from place_claims(page, entry, setting, x)


def place_claims(page: "Page", entry: dict[str, Any], setting: str, x: Any) -> Iterator[tuple[str, Claim]]:
    common = kind(entry)
    entry = entry | {"x": x, "margin": setting_value(entry.get("margin", 0.0), setting)}
    values = differences(page, entry, setting)
    if len(values):
        text = entry["text"].format(setting=setting, x=f"{x:g}" if isinstance(x, float) else x, margin=entry["margin"])
        closed = closed_form(page, entry, setting) if len(values) > 1 else None
        paper, why = (str(setting_value(entry.get(key, ""), setting, "")) for key in ("paper", "why"))
        yield setting, Claim(text, interval(page, entry, setting, values), unit(page, entry), closed, paper, why,
                             entry.get("looks", page.spec.get("looks", 1)), bar(page, entry, setting), common)


def kind(entry: dict[str, Any]) -> str:
    """The text without its setting and place, and with all its margins."""
    margins = sorted(entry["margin"].values()) if isinstance(entry.get("margin"), dict) else [entry.get("margin", 0)]
    shown = " to ".join(f"{each:g}" for each in dict.fromkeys([margins[0], margins[-1]]))
    text = re.sub(r"^\{setting\}[:,] |, \{setting\}", "", entry["text"]).replace("angle {x} degrees: ", "")
    return text.format(setting="the setting", x="x", margin=shown)


def setting_value(given: Any, setting: str, default: Any = 0.0) -> Any:
    """What stands for all settings, or the one of this setting."""
    return given.get(setting, default) if isinstance(given, dict) else given


def interval(page: "Page", entry: dict[str, Any], setting: str, values: np.ndarray) -> Interval:
    """One value is exact where it is of no unit, a closed form, and cannot be judged where it is of one."""
    bound = math.log(1 + entry["equal"]) if "equal" in entry and entry.get("scale") == "log" else entry.get("equal")
    if len(values) == 1:
        value = float(values[0] if bound is None else inside(values, bound)[0])
        frame = page.select(entry.get("metric", page.main), setting, entry.get("better") or entry["arm"])
        return Interval(value, math.nan, 1.0, 1) if (frame["unit"] != "").any() else exactly(value)
    if bound is not None:
        return equivalent(values, bound)
    return signs(values) if "test" in entry else page.interval(values)


def unit(page: "Page", entry: dict[str, Any]) -> str:
    """Of the differences."""
    return "in the logarithm" if entry.get("scale") == "log" else page.metric(entry.get("metric", page.main)).points


def bar(page: "Page", entry: dict[str, Any], setting: str) -> Bar:
    """What the entry compares its value with; see `differences`."""
    metric, log = page.metric(entry.get("metric", page.main)), entry.get("scale") == "log"
    if "equal" in entry:
        return within(page, entry, setting)
    if "better" in entry:
        return ahead(entry["margin"], metric, log)
    if "keeps" in entry:
        return share(page, entry, setting)
    side = "at_most" if "at_most" in entry else "at_least"
    words = f"{side.replace('_', ' ')} {'e^' * metric.power}{entry[side]:g}"
    if "against" in entry:
        return Bar(entry[side], -1, f"worse by {words}", metric.points, sign=True)
    return Bar(entry[side], -1 if side == "at_most" else 1, words, "" if metric.power else metric.unit, log,
               power=metric.power)


def ahead(margin: float, metric: Any, log: bool) -> Bar:
    """Of one arm over another; of logarithms as the ratio of the first to the second, which is small where the metric
    is to be low."""
    if not log:
        unit = "" if metric.power else metric.points
        said = beyond(1, f"{'e^' * metric.power}{margin:g}", margin)
        return Bar(margin, 1, said, unit, sign=True, power=metric.power)
    least = margin or 1.0
    at = least if metric.sign > 0 else 1 / least
    return Bar(at, metric.sign, beyond(metric.sign, f"{at:.3g}", margin), "times", log=True)


def beyond(side: int, bar: str, margin: float) -> str:
    """Above a bar or below it; of a margin, at least or at most."""
    return f"{('at least' if side > 0 else 'at most') if margin else ('above' if side > 0 else 'below')} {bar}"


def within(page: "Page", entry: dict[str, Any], setting: str) -> Bar:
    """Of a claim of equivalence: the end that its value is nearer to."""
    metric, least = page.metric(entry.get("metric", page.main)), entry["equal"]
    above = float(np.sum(differences(page, entry, setting))) > 0
    if entry.get("scale") != "log":
        return Bar(least if above else -least, -1 if above else 1, f"{-least:g} to {least:g}", metric.points, sign=True)
    above = above == (metric.sign > 0)  # as `ahead` has it
    ends = 1 / (1 + least), 1 + least
    return Bar(ends[above], -1 if above else 1, f"{ends[0]:.3g} to {ends[1]:.3g}", "times", log=True)


def closed_form(page: "Page", entry: dict[str, Any], setting: str) -> float | None:
    """The same difference by the closed form that the entry names."""
    if "closed" not in entry:
        return None
    values = differences(page, entry | {"metric": entry["closed"]}, setting)
    return float(values[0]) if len(values) else None


def places(page: "Page", entry: dict[str, Any], setting: str) -> list[Any]:
    if entry.get("x") != "each":
        return [entry.get("x")]
    arm = entry.get("better") or entry["arm"]
    frame = page.select(entry.get("metric", page.main), setting, arm, entry.get("table"))
    return [*dict.fromkeys(frame["x"])]


def differences(page: "Page", entry: dict[str, Any], setting: str) -> np.ndarray:
    """Of each unit, above 0 where the claim holds; of entries with `equal` the difference itself."""
    metric, log = entry.get("metric", page.main), entry.get("scale") == "log"
    where = {"setting": setting, "table": entry.get("table"), "x": entry.get("x")}
    if "better" in entry:
        margin = setting_value(entry.get("margin", 0.0), setting)
        return page.gain(metric, entry["better"], entry["worse"], log=log, **where) - (
            math.log(margin) if log and margin else margin)
    if "against" in entry:
        return entry["at_most"] - page.gain(metric, entry["against"], entry["arm"], **where)
    if "keeps" in entry:
        return kept(page, entry, metric, where)
    values = page.values(metric, arm=entry["arm"], log=log, **where).to_numpy()
    bound, sign = (entry["at_most"], 1) if "at_most" in entry else (entry["at_least"], -1)
    return sign * (np.log(bound / values) if log else bound - values)


def kept(page: "Page", entry: dict[str, Any], metric: str, where: dict[str, Any]) -> np.ndarray:
    ours, whole = gains(page, entry, metric, where)
    return (ours - entry["keeps"] * whole).to_numpy()


def gains(page: "Page", entry: dict[str, Any], metric: str, where: dict[str, Any]) -> tuple[pd.Series, pd.Series]:
    """What the arm gains over `over`, and what `of` does, of the units that have all three."""
    places = {"arm": where["x"], "of": entry.get("of_x", where["x"]), "over": entry.get("over_x", where["x"])}
    ours, whole, none = (page.values(metric, arm=entry[key], **where | {"x": x}) for key, x in places.items())
    both = page.metric(metric).sign * pd.DataFrame({"ours": ours - none, "whole": whole - none}).dropna()
    return both["ours"], both["whole"]


def share(page: "Page", entry: dict[str, Any], setting: str) -> Share:
    """Of the means, with its interval."""
    where = {"setting": setting, "table": entry.get("table"), "x": entry.get("x")}
    metric = entry.get("metric", page.main)
    ours, whole = gains(page, entry, metric, where)
    return Share(entry["keeps"], 1, f"at least {entry['keeps']:g}", ours=ours.to_numpy(), whole=whole.to_numpy())
