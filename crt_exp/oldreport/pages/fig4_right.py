"""Claims and first line of `fig4-right`: ratios of times over processes, the exponent of memory."""

from collections.abc import Iterator

import numpy as np
from scipy.special import stdtr, stdtrit

from crt_exp.oldreport.evidence import LEVEL, Bar, Claim, Interval, Unmeasured, independent
from crt_exp.oldreport.page import Page

BARS = {3136.0: 2.0, 12544.0: 5.0}  # how many times as fast as exact attention FAVOR++ is to be
SAME = 1.1                          # FAVOR++ over FAVOR+: the paper's "very similar", in figures
FORMED = "exact, matrix formed"


def claims(page: Page) -> Iterator[tuple[str, Claim | Unmeasured]]:
    setting, longest = page.settings[0], float(page.select("ms")["x"].max())
    over = ratio(page, longest, "favorpp", "favorp")
    yield setting, Claim(f"a step with FAVOR++ takes less than {SAME:g} times that of FAVOR+ at {longest:g} tokens",
                         Interval(SAME - over.mean, over.half, chance(SAME - over.mean, over), over.n), "times",
                         bar=Bar(SAME, -1, f"at most {SAME:g}", "times"), paper='"very similar computation time"')
    yield "", Unmeasured("training a regular ViT above 1000 tokens fails for lack of memory", "not comparable",
                         f"memory grows as L^{exponent(page, 'exact'):.2f} with exact attention, whose kernel forms no "
                         f"matrix, as L^{exponent(page, FORMED):.2f} where one is formed, and as "
                         f"L^{exponent(page, 'favorpp'):.2f} with FAVOR++",
                         '"increasingly difficult due to out-of-memory errors" above 1000')


def bars(page: Page) -> Iterator[tuple[str, Claim]]:
    for x, bar in BARS.items():
        over = ratio(page, x, "exact", "favorpp")
        yield page.settings[0], Claim(
            f"FAVOR++ makes more than {bar:g} times the steps of exact attention at {x:g} tokens",
            Interval(over.mean - bar, over.half, chance(over.mean - bar, over), over.n), "times",
            bar=Bar(bar, 1, f"at least {bar:g}", "times"))


def ratio(page: Page, x: float, slow: str, fast: str) -> Interval:
    """Time over time, over processes; the interval that was kept where their own times were not."""
    times = [page.values("ms", arm=arm, x=x, log=True) for arm in (slow, fast)]
    if len(times[0]) > 1:
        return independent((times[0] / times[1]).to_numpy())
    kept = [page.values(f"over_{fast}{end}", arm=slow, x=x).item() for end in ("", "_ci95", "_processes")]
    return Interval(kept[0], kept[1], float("nan"), round(kept[2]))


def chance(mean: float, over: Interval) -> float:
    """Student's, of a mean as far from 0, from the interval's width."""
    error = over.half / float(stdtrit(over.n - 1, 1 - LEVEL / 2))
    return float(2 * stdtr(over.n - 1, -abs(mean) / error))


def exponent(page: Page, arm: str) -> float:
    """The slope of log(memory) against log(tokens), least squares."""
    frame = page.select("mib", arm=arm)
    return float(np.polyfit(np.log(frame["x"].astype(float)), np.log(frame["value"].astype(float)), 1)[0])


def first_lines(page: Page) -> list[str]:
    """Uniform attention is the floor: what the rest of the model takes."""
    places = sorted({*page.select("ms", arm="favorpp")["x"]})
    time = {(arm, x): float(page.values("ms", arm=arm, x=x, log=True).mean()) for arm in ("exact", "favorpp", "uniform")
            for x in places}
    slower = [x for x in places if time["favorpp", x] > time["exact", x]]
    ahead = f"**Up to {max(slower):g} tokens exact attention is the faster one.** " if slower else ""
    return [f"{ahead}With uniform attention, which looks at no query and no key, a step at {places[-1]:g} tokens takes "
            f"{time['uniform', places[-1]] / time['favorpp', places[-1]]:.0%} of that with FAVOR++: the rest of the "
            "model leaves no more to gain."]
