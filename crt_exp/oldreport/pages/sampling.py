"""The first line of sampling: where log-uniform negatives win."""

from crt_exp.oldreport.evidence import won_by
from crt_exp.oldreport.page import Page

CONTROL, LAWS = "log-uniform", ("FAVOR++", "trigonometric")
STEP = ("a step", "tree features")


def first_lines(page: Page) -> list[str]:
    settings = [setting for setting in page.settings if setting.startswith("gradient")]
    arms = [arm for arm in page.arms if arm.startswith(LAWS)]
    beaten = {f"{setting.removeprefix('gradient, ')}, {page.metric(metric).name}": worse(page, metric, setting, arms)
              for setting in settings for metric in ("bias_sq", "variance")}
    places = times(page, STEP)
    faster = [f"{x:,.0f}" for x in places if times(page, ("a step", CONTROL))[x] <= places[x]]
    said = won_by("the log-uniform law", beaten, len(arms) * len(beaten))
    return [f"{said} A step with it takes less time than with features down the tree at {' and '.join(faster)} "
            "classes."]


def worse(page: Page, metric: str, setting: str, arms: list[str]) -> list[str]:
    bound = page.values(metric, setting, CONTROL).mean()
    return [arm for arm in arms if page.values(metric, setting, arm).mean() >= bound]


def times(page: Page, of: tuple[str, str]) -> dict[float, float]:
    """classes -> milliseconds."""
    setting, arm = of
    return {x: page.values("ms", setting, arm, x=x).mean() for x in page.select("ms", setting, arm)["x"].unique()}
