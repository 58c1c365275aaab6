"""The page table1: its tables, and the paper's own compared with the majority class."""

from crt_exp.drawing import markdown
from crt_exp.oldreport import tables
from crt_exp.oldreport.page import Page

COLUMNS = ("trig", "pos", "gerf", "pois", "geom", "oprf", "pois_plus", "geom_plus")
PAPER = {  # CRT Table 1, test accuracy in percent
    "abalone": (12.0, 16.0, 17.0, 18.0, 18.3, 17.1, 14.0, 15.1),
    "banknote": (66.2, 83.4, 92.4, 84.4, 94.5, 92.6, 80.1, 85.6),
    "car": (66.3, 69.2, 70.9, 66.3, 66.3, 69.5, 66.3, 67.2), "yeast": (29.7, 34.4, 42.9, 36.9, 35.9, 44.4, 29.7, 31.0),
    "cmc": (46.6, 45.1, 47.8, 46.6, 47.3, 46.3, 35.5, 43.5),
    "nursery": (31.3, 77.4, 63.8, 77.1, 77.1, 78.9, 77.3, 71.0),
    "wifi": (15.2, 88.8, 93.3, 95.3, 95.8, 93.3, 77.2, 82.9), "chess": (16.5, 20.2, 20.4, 19.1, 19.5, 20.2, 19.2, 22.5)}


def sections(page: Page) -> list[str]:
    rows = [[name, *(f"{value:.1f}" for value in values), f"{majority(page, name):.1f}"]
            for name, values in PAPER.items()]
    mean = [f"{sum(each) / len(PAPER):.1f}" for each in zip(*PAPER.values())]
    header = ["data set", *(page.label(arm) for arm in COLUMNS), "majority class here"]
    below = [f"{page.label(arm)} on {name} {value}" for name, values in PAPER.items()
             for arm, value in zip(COLUMNS, values) if value < majority(page, name)]
    return [*tables.sections(page), f"## The paper's table, %\n\n{markdown(header, [*rows, ['average', *mean, '']])}\n"
            f"Below the majority class here: {'; '.join(below) or 'none'}."]


def majority(page: Page, name: str) -> float:
    return float(page.values("accuracy", name, "majority").mean())
