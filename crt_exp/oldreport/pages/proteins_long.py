"""What the file of proteins-long cannot say: bars over the ratios of two times, of which each process has its own."""

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from crt_exp.oldreport.evidence import Bar, Claim, Unmeasured, independent
from crt_exp.oldreport.page import Page

FASTER, FLAT, STEADY = 4.0, 0.85, 1.1  # what is to be reached


class TimeRatio(NamedTuple):
    """metric of (arm, x) over that of another, at least or, of times, at most `bound`."""

    text: str
    metric: str
    setting: str
    over: tuple[str, int]
    under: tuple[str, int]
    bound: float

    @property
    def rises(self) -> bool:
        """Whether it is to be above the bound."""
        return self.metric == "letters_per_s"

    @property
    def said(self) -> str:
        return f"{'at least' if self.rises else 'at most'} {self.bound:g}"

    def ratios(self, page: Page) -> pd.Series:
        """By process; empty where only medians over processes are left."""
        over, under = (page.values(self.metric, self.setting, arm, "time", x, log=True)
                       for arm, x in (self.over, self.under))
        return (over / under).dropna()


BARS = [
    *(TimeRatio(f"the {part} trains more than {FASTER:g} times as fast with FAVOR++ as with exact attention at 8192 "
            "letters", "letters_per_s", part, ("favorpp", 8192), ("exact", 8192), FASTER)
      for part in ("attention layer", "model", "wide model")),
    TimeRatio(f"the model with FAVOR++ reads more than {FLAT:g} times as many letters a second at 32768 as at 1024",
          "letters_per_s", "model, all lengths in turn", ("favorpp", 32768), ("favorpp", 1024), FLAT),
    TimeRatio(f"FAVOR++ draws a letter behind 8000 in less than {STEADY:g} times the time of one behind 100", "ms",
          "drawing letters", ("favorpp", 8000), ("favorpp", 100), STEADY)]


def bars(page: Page) -> Iterator[tuple[str, Claim | Unmeasured]]:
    for bar in BARS:
        ratios = bar.ratios(page).to_numpy()
        side = 1 if bar.rises else -1
        if len(ratios) > 1:
            yield bar.setting, Claim(
                bar.text, independent(side * (ratios - bar.bound)), "times",
                bar=Bar(bar.bound, side, bar.said, "times"))
        else:
            yield "", Unmeasured(bar.text, "cannot tell here", left(page, bar))


def left(page: Page, bar: TimeRatio) -> str:
    """What is still known where the times of the processes are not."""
    mean, half = (page.values(metric, arm=bar.text).to_numpy(float) for metric in ("beyond", "beyond_ci95"))
    side = 1 if bar.rises else -1
    known = [f"{bar.bound + side * each:.3g} ± {width:.3g} times (bar: {bar.said})" for each, width in zip(mean, half)]
    return "; ".join(["of the times of the processes only medians are left",
                      *(f"their mean is {each}" for each in known)])
