"""Who may import whom: the diagram in docs/contributing.md, compared with the imports of every module."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "crt_exp"
PICTURE = (PACKAGE.parent / "docs" / "contributing.md").read_text()
BOXES = {room: box for box, rooms in re.findall(r'^ +(\w+)\["<b>(.*?)</b>', PICTURE, re.M)
         for room in rooms.split(", ")}
ARROWS = re.findall(r"^ +(\w+) --> (\w+)$", PICTURE, re.M)
COMMANDS = ("__main__", "infer", "predict", "transcribe", "sample")
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


def box(name):
    """The box of the picture that a module stands in."""
    parts = name.split(".")
    return "commands" if parts[-1] in COMMANDS else BOXES[parts[1]]


@cache
def below(start):
    """The boxes that arrows lead to from one."""
    return frozenset().union(*({end} | below(end) for begin, end in ARROWS if begin == start))


def test_every_import_follows_arrows_of_the_picture():
    odd = [f"{name} imports {other}: docs/contributing.md has no arrows from {box(name)} to {box(other)}"
           for name in MODULES if name != FRONT for other in sorted(imported(name))
           if box(other) not in below(box(name)) | {box(name)}]
    assert not odd, "\n".join(odd)


def test_every_arrow_of_the_picture_is_an_import_and_none_follows_from_others():
    found = {(box(name), box(other)) for name in MODULES if name != FRONT for other in imported(name)}
    assert set(ARROWS) <= found and len(set(ARROWS)) == len(ARROWS)
    assert not [(begin, end) for begin, end in ARROWS for other in below(begin) if other != end and end in below(other)]


def test_no_circle():
    TopologicalSorter({name: imported(name) for name in MODULES}).prepare()  # raises CycleError, which names the circle


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
    odd = {name for name in needed if name.split(".")[1] in apart}
    assert needed and not odd, f"{room} needs {sorted(odd)}"
