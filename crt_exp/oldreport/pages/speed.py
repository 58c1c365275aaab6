"""What speed cannot declare: how many arms uniform attention beats, and from which length on exact attention is
slower."""

import numpy as np

from crt_exp.drawing import markdown
from crt_exp.oldreport import tables
from crt_exp.oldreport.evidence import independent
from crt_exp.oldreport.page import Page

ALONE, CAUSAL, EXACT = "attention", " causal", "exact"
TRAINING, INFERENCE = "training", "inference"
CONTROLS, OURS = ("identity", "uniform"), ("favorpp", "nearfar")


def first_lines(page: Page) -> list[str]:
    pairs = [(arm, n) for arm in page.arms if kind(arm) not in CONTROLS and not arm.startswith("trig")
             for n in lengths(page, ALONE, arm)]
    faster = sum(below(page, ALONE, f"uniform{CAUSAL if arm.endswith(CAUSAL) else ''}", arm, n) for arm, n in pairs)
    longest = max(lengths(page, ALONE, EXACT))
    took = ", ".join(f"{page.label(arm)} {ms(page, ALONE, arm, longest):.0f} ms" for arm in ("uniform", *OURS, EXACT))
    return [f"**Uniform attention, a control, is faster than {faster} of {len(pairs)} arms**: it looks at no query "
            f"and no key. A training step at L = {longest:g}: {took}. Time says nothing of what attention finds. In a "
            f"model the rest bounds what any attention can gain: {'; '.join(bounds(page))}."]


def bounds(page: Page) -> list[str]:
    made = []
    for part in [setting for setting in page.settings if setting not in (ALONE, "later", "memory")]:
        n = max(lengths(page, part, EXACT))
        gains = [ms(page, part, EXACT, n) / ms(page, part, arm, n) for arm in ("identity", *OURS)]
        made.append(f"{part}, L = {n:g}: without any attention {gains[0]:.3g} times as fast as with exact attention, "
                    f"with FAVOR++ {gains[1]:.3g}, near-far {gains[2]:.3g}")
    return made


def sections(page: Page) -> list[str]:
    return [overtaken(page), *tables.sections(page)]


def overtaken(page: Page) -> str:
    arms = [arm for arm in page.arms if kind(arm) not in (EXACT, *CONTROLS) and not arm.startswith("trig")
            and lengths(page, ALONE, arm)]
    rows = [[page.label(arm), *(crossover(page, arm, metric) for metric in (TRAINING, INFERENCE))] for arm in arms]
    return ("## From which length on a method is faster than exact attention\n\nExact attention is causal for causal "
            "methods: the least measured L from which on every 95% interval over processes, or the value where there "
            "is but one, is below exact attention's time, and the last L at which it is above.\n\n"
            + markdown(["method", *(f"{metric}: faster from, slower up to" for metric in (TRAINING, INFERENCE))], rows))


def crossover(page: Page, arm: str, metric: str) -> str:
    base = EXACT + (CAUSAL if arm.endswith(CAUSAL) else "")
    shared = [n for n in lengths(page, ALONE, arm) if n in lengths(page, ALONE, base)]
    slower = [n for n in shared if below(page, ALONE, base, arm, n, metric)]
    ahead = [n for n in shared if all(below(page, ALONE, arm, base, other, metric) for other in shared if other >= n)]
    return f"{min(ahead, default='none')}, {max(slower, default='none')}"


def below(page: Page, setting: str, first: str, second: str, n: int, metric: str = TRAINING) -> bool:
    """Whether the first takes less time than the second."""
    gain = page.gain(metric, first, second, log=True, setting=setting, x=n)
    return bool(len(gain)) and bool((independent(gain).low if len(gain) > 1 else gain[0]) > 0)


def ms(page: Page, setting: str, arm: str, n: int) -> float:
    return float(np.median(page.values(TRAINING, setting, arm, x=n)))


def lengths(page: Page, setting: str, arm: str) -> list[int]:
    return sorted({int(n) for n in page.select(TRAINING, setting, arm)["x"]})


def kind(arm: str) -> str:
    """Without its direction and size."""
    return arm.removesuffix(CAUSAL).partition(" m=")[0]
