"""make redraw: Figures 5 and 15 of Performers, exact weights moved into random features, their recovery, and redraws.

On generated families of proteins, where attention matters: gates say whether it does before anything is trained on. The
same is measured on real proteomes, whose gates are shown as they come out.
"""

from crt_exp.report import redraw_page
from crt_exp.report.evidence import Gate, check_gates
from crt_exp.report.protein_runs import ready, train, trained, training, values
from crt_exp.report.redraw_checkpoint import after_swap, look
from crt_exp.report.redraw_runs import SETTINGS, SOURCES, Found, Setting, World, looking, swapping, uptraining
from crt_exp.report.redraw_verdicts import gates
from crt_exp.report.writing import Cells


def main(size: str) -> None:
    setting, cells = SETTINGS[size], Cells("redraw", SOURCES)
    found, passed = {}, {}
    for world in setting.worlds:
        found[world], passed[world] = looked(world, setting, cells)
        if world == setting.main:
            check_gates(passed[world])
    for world in setting.worlds:
        keys = uptraining(world, setting)
        cells.fill(list(keys.values()), train, f"{world}: uptraining", setting.base.workers)
        found[world].trained = values(cells, keys)
    redraw_page.write(size, setting, found, passed, cells.seconds())


def looked(world: World, setting: Setting, cells: Cells) -> tuple[Found, list[Gate]]:
    """The exact models, their weights in every attention as they are, and what the gates say of that."""
    exact = [training("exact", world.direction, seed, setting.base, world.dataset)
             for seed in range(setting.base.seeds)]
    trained(exact, setting.base, f"{world}: exact models")
    for seed in range(setting.base.seeds):  # a cell may be known and its directory gone
        ready(world.direction, seed, setting.base, world.dataset)
    swaps, layers = swapping(world, setting), looking(world, setting)
    cells.fill(list(swaps.values()), after_swap, f"{world}: after the swap", setting.base.workers)
    cells.fill(list(layers.values()), look, f"{world}: layers", setting.base.workers)
    found = Found(values(cells, swaps), values(cells, layers))
    return found, gates(setting, found)
