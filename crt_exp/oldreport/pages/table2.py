"""The first lines of `table2`: of what exact attention gains on the examples of dev what each arm keeps, what these
examples can tell beside what the paper's table says, and which arms a control beats."""

import numpy as np

from crt_exp.oldreport.page import Page

MODEL = "MiniLM, "  # before the data set in settings
# FAVOR++ above FAVOR+ in the paper's Table 2, points.
PAPER = {"SST-2": 1.42, "CoLA": 1.78, "STS-B": 0.55, "MRPC": 1.96, "RTE": 0.28, "QNLI": 2.45, "MNLI": 0.99, "QQP": 0.62}
METRIC = {"CoLA": "mcc", "STS-B": "spearman", "MRPC": "f1"}
SHOWN = 8  # arms whose share is said, from the best on


class Plain(Page):
    """Without a module of its own."""

    code = None


def first_lines(page: Page) -> list[str]:
    there = [setting for setting in page.settings if setting.removeprefix(MODEL) in PAPER]
    lines = [line(page, setting) for line in (kept, told) for setting in there]
    return [each for each in lines if each] + Plain(page.name, page.folder, page.spec, page.draws).first_lines()


def gain(page: Page, setting: str, better: str, worse: str) -> np.ndarray:
    return page.gain(METRIC.get(setting.removeprefix(MODEL), "accuracy"), better, worse, setting=setting, table="parts")


def kept(page: Page, setting: str) -> str:
    """Of the arms that look at other places."""
    whole = gain(page, setting, "exact", "uniform")
    if not len(whole):
        return ""
    gains = {arm: gain(page, setting, arm, "uniform") for arm in page.arms if arm not in ("exact", *page.controls)}
    means = {page.label(arm): each.mean() for arm, each in gains.items() if len(each)}
    ranked = sorted(means, key=means.get, reverse=True)
    said = ", ".join(f"{name} {means[name]:+.1f}" for name in ranked[:SHOWN]) or "Nothing else was measured"
    rest = [means[name] for name in ranked[SHOWN:]]
    more = f"; {len(rest)} others from {min(rest):+.1f} to {max(rest):+.1f}" if rest else ""
    return (f"**{setting}: exact attention scores {page.interval(whole):+.1f} points above uniform attention.** "
            f"{said}{more}.")


def told(page: Page, setting: str) -> str:
    """The half-width of the interval beside the paper's difference."""
    found = gain(page, setting, "favorpp m=256", "favorp m=256")
    if len(found) < 2:
        return ""
    seen, paper = page.interval(found), PAPER[setting.removeprefix(MODEL)]
    verb = "cannot" if seen.half > paper else "can"
    return (f"**{setting}: its dev split {verb} tell what the paper's table says.** There FAVOR++ scores "
            f"{paper:.2f} points above FAVOR+; here {seen:+.1f}, an interval over the examples alone.")
