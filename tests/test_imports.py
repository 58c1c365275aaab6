"""Who may import whom: arrows between the rooms of the package point downward, and no two modules need each other."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "crt_exp"

# From the bottom to the top: a module imports from lines above its own, or from its own line.
# The longest name that fits counts.
ROOMS = [
    ["options", "measure.times"],
    ["samplers"],
    ["features"],
    ["bounds"],
    ["attention"],
    ["nearfar"],
    ["config"],
    ["data"],
    ["swap"],
    ["mechanism"],
    ["models.folder"],
    ["drawing"],
    ["swap.bench", "swap.advise", "swap.pretrained"],
    ["sampled_softmax"],
    ["models"],
    ["data.__main__"],
    ["measure.base"],
    ["estimators"],
    ["tasks"],
    ["runner"],
    ["train", "infer"],
    ["measure", "advice.task"],
    ["evolution"],
    ["report", "papers"],
    ["__main__", "predict", "transcribe", "sample"],
]
FRONT = "crt_exp"  # its names are imported when first used, so it stands beside the rooms


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported(name):
    """The modules of the package that a module imports, also inside functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: write the full name of the module"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in MODULES else node.module for each in names}
    return {each for each in found if each in MODULES} - {name, FRONT}


def height(name):
    """The line of ROOMS that a module stands in."""
    within = name.removeprefix(f"{FRONT}.")
    found = [(len(room), line) for line, rooms in enumerate(ROOMS) for room in rooms
             if f"{within}.".startswith(f"{room}.")]
    assert found, f"{name} stands in no room: add it to ROOMS of this test, where its imports allow it"
    return max(found)[1]


def test_imports_point_downward():
    upward = [f"{name} imports {other}, which stands above it" for name in MODULES if name != FRONT
              for other in sorted(imported(name)) if height(other) > height(name)]
    assert not upward, "\n".join(upward)


def test_no_circle():
    TopologicalSorter({name: imported(name) for name in MODULES}).prepare()  # raises CycleError, which names the circle


def test_the_library_stands_below_its_command_line():
    """The front door of the library needs nothing of tasks, runner and reports."""
    limit = height("crt_exp.tasks")
    homes = __import__(FRONT)._HOMES
    assert homes and all(height(home) < limit for home in homes)


CORE = ("samplers", "features", "bounds", "mechanism", "attention", "nearfar", "swap", "sampled_softmax",
        "estimators")


def test_the_core_needs_no_runs_and_no_data():
    """A library of maps and attention: nothing that it imports, however indirectly, reads data, trains or reports."""
    for room in CORE:
        check_apart(room, {"runner", "tasks", "data", "models", "measure", "report"})


def test_maps_samplers_and_layers_need_no_configuration():
    """They are made of arguments; names and files become these in `Mechanism`, which stands above."""
    for room in ("samplers", "features", "bounds", "attention", "nearfar"):
        check_apart(room, {"config", "mechanism"})


def check_apart(room, apart):
    needed, left = set(), [name for name in MODULES if f"{name}.".startswith(f"{FRONT}.{room}.")]
    while left:
        needed.add(name := left.pop())
        left += imported(name) - needed
    odd = {name for name in needed if name.split(".")[1] in apart and height(name) > 0}
    assert needed and not odd, f"{room} needs {sorted(odd)}"
