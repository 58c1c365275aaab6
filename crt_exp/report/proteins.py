"""make proteins: Figure 6 and Tables 1 and 2 of Performers, language models of proteins with every attention.

Next letters (U) and masked ones (B), on generated families, where attention matters, and on real proteomes. Tested on
sequences of the same source and on families, or a proteome, held out. Exact attention and the controls come first:
what uniform attention costs says what a source can tell.
"""

from typing import Any

from crt_exp.report import protein_page, protein_runs
from crt_exp.report.protein_runs import (
    CONTROLS,
    DATASETS,
    DIRECTIONS,
    Dataset,
    Setting,
    arms,
    trained,
    training,
    values,
)


def main(size: str) -> None:
    setting = protein_runs.SETTINGS[size]
    keys = {dataset: runs_of(setting, dataset) for dataset in DATASETS}
    for dataset in DATASETS:
        first = [key for (_, name, _), key in keys[dataset].items() if name in ("exact", *CONTROLS)]
        trained(first, setting, f"{dataset}: exact and controls")
    every = [key for here in keys.values() for key in here.values()]
    cells = trained(every, setting, "training")
    found = {dataset: values(cells, here) for dataset, here in keys.items()}
    protein_page.write(size, setting, found, cells.seconds(every))


def runs_of(setting: Setting, dataset: Dataset) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(direction, attention, seed) -> key; seed by seed, so that an interrupted report has whole seeds."""
    return {(direction, name, seed): training(name, direction, seed, setting, dataset)
            for seed in range(setting.seeds) for direction in DIRECTIONS for name in arms(direction)}
