"""The first lines of hrf-lm: which arms are saturated, and where a law that knows no query is as near as an arm."""

from crt_exp.oldreport.page import Page

SATURATED = 0.9995  # KS over classes from which on three digits say 1.000


def first_lines(page: Page) -> list[str]:
    return [line for setting in page.settings for line in (*saturated(page, setting), *beaten(page, setting))]


def saturated(page: Page, setting: str) -> list[str]:
    """Named, for their order says nothing."""
    largest = arms_of(page, setting)
    names = [page.label(arm) for arm, m in largest.items()
             if page.values("ks_index", setting, arm, x=m).mean() > SATURATED]
    said = (f"**{setting}: KS over classes is 1.000 with {', '.join(names)}, with the largest m too: nearly all the "
            "weight lies on other words than in the exact law, and the order of these arms says nothing.**")
    return [said] if names else []


def beaten(page: Page, setting: str) -> list[str]:
    lines, largest = [], arms_of(page, setting)
    for law in page.controls:
        bound = page.values("ks_index", setting, law).mean()
        names = [page.label(arm) for arm, m in largest.items()
                 if page.values("ks_index", setting, arm, x=m).mean() >= bound]
        if names:
            lines.append(f"**{setting}: {page.label(law)}, which knows no query, is at least as near to the exact "
                         f"one as {', '.join(names)} with m = {next(iter(largest.values())):g} (KS over classes).**")
    return lines


def arms_of(page: Page, setting: str) -> dict[str, float]:
    """Arm -> its largest m, of all but controls."""
    frame = page.select("ks_index", setting)
    frame = frame[~frame["arm"].isin(page.controls)]
    return frame.groupby("arm", sort=False)["x"].max().to_dict()
