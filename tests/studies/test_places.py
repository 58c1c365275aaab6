"""Draws that are committed stand where the driver puts them, as far as the page's file says it: nothing is measured."""

from pathlib import Path

import pandas as pd
import pytest

from crt_exp.report import draws, page
from crt_exp.studies.grid import Part

COMMITTED = Path(__file__).parents[2] / "outputs/report"
COLUMNS = ["setting", "arm", "metric", "table", "unit", "x"]
# metrics that the rows of some arms lack, or have of others too
OF_SOME = {"fig2": ["clamped"], "attention-maps": ["row"], "adapt": ["time_ratio", "memory_ratio"]}
DRIVEN = [name for name in page.names() if page.load(name).get("sizes", {}).get("small", {}).get("parts")
          and "measure" not in page.load(name)]


def plain(value):
    """Numbers as numbers, whatever a column of a file makes of them."""
    try:
        return str(float(value))
    except (TypeError, ValueError):
        return str(value)


def said(template):
    """What a row does not decide; None for what it does."""
    return None if "{" in str(template) else template


def places(name):
    """Of all fields of all cells, as COLUMNS, None where only rows say it; and whether each row has the field."""
    for part in (Part.read(part, folders(name)) for part in page.load(name)["sizes"]["small"]["parts"]):
        fields = [(None, what) for what in part.fields]
        for control, given in part.controls.items():
            fields += [(control, what) for what in ([given] if isinstance(given, dict) else given)]
        first = next(iter(part.arms))
        for setting, arm, x, seed, _ in part.places():
            for control, what in fields:
                if control is None or (arm in ("", first) and not seed):
                    named = {None: None, **part.arms} if what["metric"] in OF_SOME.get(name, ()) else part.arms
                    for who in [control or arm] if control or not part.together else named:
                        yield place_of(part, what, setting, who, x, seed, control), "unless" not in what


def place_of(part, what, setting, arm, x, seed, control):
    given = part.arms.get(arm)
    over = given.get("over", 1) if isinstance(given, dict) else 1
    if "arm" in what:
        arm = arm if part.together and said(what["arm"]) is None else said(what["arm"])
    unit = None if "unit" in what or "each" in what else seed if part.seeds > 1 and control is None else ""
    x = None if "x" in what else x / over if over != 1 else x
    made = (said(what.get("setting", setting)), arm, what["metric"], said(what.get("table", "")), unit, x)
    return tuple(None if each is None else plain(each) for each in made)


def folders(name):
    """Of models that need not be there."""
    return {start: ["here"] for start in page.load(name)["sizes"]["small"].get("starts", {})}


def committed(name, units):
    """The places of draws, each once, numbers as numbers; units that no place says are one."""
    frame = pd.read_csv(draws.path_of(name, COMMITTED), usecols=COLUMNS, dtype=str, keep_default_na=False)
    frame = frame.transform(lambda column: column.map({each: plain(each) for each in column.unique()}))
    return frame.assign(unit=frame["unit"].where(frame["unit"].isin(units), "of rows")).drop_duplicates()


def mask_of(place):
    return tuple(column for column, value in zip(COLUMNS, place) if value is not None)


def kept(place):
    return tuple(value for value in place if value is not None)


@pytest.mark.parametrize("name", DRIVEN)
def test_committed_draws_stand_where_the_driver_puts_them(name):
    declared = dict(places(name))
    frame = committed(name, {place[4] for place in declared})
    stand = {mask: [*zip(*(frame[column] for column in mask))] for mask in {*map(mask_of, declared)}}
    found = {mask: {*rows} for mask, rows in stand.items()}
    lacking = [place for place, always in declared.items() if always and place[2] not in OF_SOME.get(name, ()) and
               kept(place) not in found[mask_of(place)]]
    assert not lacking, f"declared and not drawn: {lacking[:5]}"
    if not {"derived", "runs"} & {*page.load(name)["sizes"]["small"]}:       # which say their own places
        known = {(mask_of(place), kept(place)) for place in declared}
        odd = [rows for rows in zip(*stand.values()) if not {*zip(stand, rows)} & known]
        assert not odd, f"drawn and not declared: {odd[:5]}"
