"""make proteins: Figure 6 and Tables 1 and 2 of Performers, language models on proteomes with every attention.

Next letters (U) and masked ones (B); tested on sequences of the same proteomes and on a proteome that was held out.
Exact attention and the controls come first: what uniform attention costs says what this setting can tell.
"""

from typing import Any

from crt_exp.report import protein_page, protein_runs
from crt_exp.report.protein_runs import CONTROLS, DIRECTIONS, Setting, arms, trained, training, values


def main(size: str) -> None:
    setting = protein_runs.SETTINGS[size]
    keys = runs_of(setting)
    trained([key for (_, name, _), key in keys.items() if name in ("exact", *CONTROLS)], setting, "exact and controls")
    cells = trained(list(keys.values()), setting, "training")
    protein_page.write(size, setting, values(cells, keys), cells.seconds())


def runs_of(setting: Setting) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(direction, attention, seed) -> key; seed by seed, so that an interrupted report has whole seeds."""
    return {(direction, name, seed): training(name, direction, seed, setting)
            for seed in range(setting.seeds) for direction in DIRECTIONS for name in arms(direction)}
