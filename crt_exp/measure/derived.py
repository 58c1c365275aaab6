"""Draws of draws, which a size of a page lists under `derived`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from crt_exp.measure.cells import Draw


def ratios(draws: Iterable[Draw], metrics: Mapping[str, str], arm: str, over: str, table: str, per: Sequence[str] = (),
           log: bool = False, into: Mapping[str, str] | None = None) -> Iterator[Draw]:
    """Of each setting and of each value of `per` (unit, x): the geometric mean of an arm over that of another, or its
    logarithm. metrics: metric -> what the ratio is called. into: setting -> that of the ratio, where it is another,
    whose units are "setting, unit"."""
    groups: dict[tuple, dict[str, list[Draw]]] = defaultdict(lambda: defaultdict(list))
    for draw in draws:
        if draw.table == table and draw.metric in metrics and (into is None or draw.setting in into):
            groups[draw.setting, draw.metric, *(getattr(draw, key) for key in per)][draw.arm].append(draw)
    for arms in groups.values():
        if arms[arm] and arms[over]:
            first, ratio = arms[arm][0], mean_log(arms[arm]) - mean_log(arms[over])
            empty = {key: "" for key in ("unit", "x", "seconds") if key not in per}
            made = replace(first, metric=metrics[first.metric], value=ratio if log else float(np.exp(ratio)), **empty)
            yield made if into is None else moved(made, into)


def mean_log(draws: Sequence[Draw]) -> float:
    return float(np.mean(np.log([draw.value for draw in draws])))


def means(draws: Iterable[Draw], metric: str, table: str, arms: Sequence[str], count: int, into: Mapping[str, str]
          ) -> Iterator[Draw]:
    """The mean of units that have one remainder by `count`, such as one model, in settings of their own, as for
    `ratios`; of these arms, where they have as many units as any."""
    places: dict[tuple[Any, ...], list[Draw]] = defaultdict(list)
    for draw in draws:
        if (draw.table, draw.metric) == (table, metric) and draw.arm in arms and draw.setting in into:
            places[draw.setting, draw.arm, draw.x].append(draw)
    most = {setting: max(len(each) for place, each in places.items() if place[0] == setting)
            for setting, *_ in places}
    for (setting, *_), each in places.items():
        for model in range(count if len(each) == most[setting] else 0):
            value = fmean(draw.value for draw in each if draw.unit % count == model)
            yield moved(replace(each[0], unit=model, value=value, seconds=""), into)


def shares(draws: Sequence[Draw], metric: str, of: str, table: str) -> Iterator[Draw]:
    """A metric `of` each arm over its mean of exact attention, of the seeds that all arms of a setting have."""
    test = [draw for draw in draws if draw.table == table and draw.metric == of]
    for setting in dict.fromkeys(draw.setting for draw in test):
        here = [draw for draw in test if draw.setting == setting]
        seeds = [{draw.unit for draw in here if draw.arm == arm} for arm in {draw.arm for draw in here}]
        ours = [draw for draw in here if draw.unit in set.intersection(*seeds)]
        exact = [draw.value for draw in ours if draw.arm == "exact"]
        for draw in ours if exact else ():
            yield replace(draw, metric=metric, value=draw.value * len(exact) / sum(exact), seconds="")


def moved(draw: Draw, into: Mapping[str, str]) -> Draw:
    return replace(draw, setting=into[draw.setting], unit=f"{draw.setting}, {draw.unit}")
