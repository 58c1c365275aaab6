"""Which files decide a measurement: what the module of its function imports, what these import, the conf/ they name.

Nobody lists them. A walk begins at `sources`: files or folders of the package, of conf/ or of the working directory
("tasks/mlm.py", "conf/task/mlm.yaml", "mine/gain.py"), and stays out of those written with "!" ("!features"). It goes
through imports, those inside functions too, options such as "task=mlm" that stand as strings in the code, `_target_`
and `defaults` of conf/, and the C beside a module. cells.py and this file, which decide no value, are left out with all
that they import.
"""

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from crt_exp import _HOME_OF
from crt_exp.config import CONF, NAMED, own_folders

PACKAGE = Path(__file__).parent.parent
DRIVER = "crt_exp.measure.grid"            # of all pages
TRAINING = "crt_exp.measure.training"      # and this, of those with `starts` or `runs`
KEEPING = [Path(__file__).relative_to(PACKAGE).with_name(name) for name in ("cells.py", "sources.py")]
OPTION = re.compile(r"(task|experiment|trainer)=([\w-]+)")
# What is read by name. A Mechanism is a map for some modules; where one names LAYERS, what layers need counts too.
MECHANISM, LAYERS, OF_LAYERS = "mechanism.py", {"layer", "swap", "swap_attention"}, ("swap/swap.py", "conf/attention")
READ = {MECHANISM: ("conf/config.yaml", "conf/features", "conf/sampler"),
        "train.py": ("conf/config.yaml", "conf/trainer/default.yaml")}


def of_page(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the walk of a page begins: the driver, that of runs, what its sizes name, and the names of one's own that
    it may name; sorted, so that no order of paragraphs measures anew."""
    trained = {"starts", "runs"} & {key for size in spec.get("sizes", {}).values() for key in size}
    return tuple(sorted({*map(name_of, (file_of(DRIVER), *([file_of(TRAINING)] if trained else ()),
                                        *named(spec.get("sizes")), *own_files()))}))


def own_files() -> Iterator[Path]:
    """The files of attention, maps and samplers in the folders of `own_names`."""
    for folder in own_folders():
        yield from sorted(path for group in NAMED for path in (folder / group).rglob("*.yaml"))


@cache
def fingerprint(sources: tuple[str, ...]) -> str:
    """A digest of what the files of a walk do: Python without docstrings and comments, the values of YAML, C whole."""
    return hashlib.sha256("\n".join(look(file, read(file))[0] for file in closure(sources)).encode()).hexdigest()[:16]


@cache
def closure(sources: tuple[str, ...]) -> tuple[Path, ...]:
    """The files of a walk, in order. Raises FileNotFoundError for a source that does not exist."""
    todo = [file for source in sources if not source.startswith("!") for file in files_of(source)]
    out = {file for source in sources if source.startswith("!") for file in files_of(source[1:])} - {*todo}
    reached, out = set(), out | {PACKAGE / file for file in KEEPING}
    while todo:
        if (file := todo.pop()) not in reached | out:
            reached.add(file)
            todo += look(file, read(file))[1]
    return tuple(sorted(reached))


def files_of(source: str) -> list[Path]:
    """The sources in a file or folder. Raises FileNotFoundError where there is none."""
    roots = (CONF.parent if source.startswith("conf/") else PACKAGE, Path.cwd())
    path = next((root / source for root in roots if (root / source).exists()), None)
    if path is None:
        raise FileNotFoundError(f"{source}: not a file or folder of crt_exp, conf or this directory")
    return [path] if path.is_file() else sorted(
        file for file in path.rglob("*") if file.suffix in (".py", ".c", ".h", ".yaml"))


def name_of(file: Path) -> str:
    """The reverse: as a source is written; of a file elsewhere its whole path."""
    root = next((root for root in (PACKAGE, CONF.parent, Path.cwd()) if file.is_relative_to(root)), None)
    return (file if root is None else file.relative_to(root)).as_posix()


def file_of(module: str) -> Path | None:
    """Of a module of the package or of the working directory; None for others."""
    root, path = PACKAGE.parent if module.split(".")[0] == PACKAGE.name else Path.cwd(), module.replace(".", "/")
    return next(filter(Path.is_file, (root / f"{path}.py", root / path / "__init__.py")), None)


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def look(file: Path, text: str) -> tuple[str, tuple[Path, ...]]:
    """What a file says, however it is written, and the files that it names."""
    if file.suffix == ".yaml":
        node = {key: value for key, value in values(text).items() if key != "hydra"}  # where the help stands
        return str(node), (*named(node), *(() if file.parent == CONF else defaults(file, node)))
    return (text, ()) if file.suffix != ".py" else (ast.dump(tree := statements(text)), (*of_code(file, tree),))


def values(text: str) -> dict[str, Any]:
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def statements(text: str) -> ast.Module:
    """Python code as a syntax tree, without the words of docstrings."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body[0].value.value = ""
    return tree


def of_code(file: Path, tree: ast.Module) -> Iterator[Path]:
    """The files that a module imports, names or reads, and the C beside it."""
    nodes, own = [*ast.walk(tree)], name_of(file)
    yield from imported(tree.body if own == MECHANISM else nodes)  # those in its functions are OF_LAYERS
    yield from named([node.value for node in nodes if isinstance(node, ast.Constant)])
    words = {getattr(node, key, None) for node in nodes for key in ("id", "attr", "name")}
    for source in (*READ.get(own, ()), *(OF_LAYERS if words & LAYERS and own != MECHANISM else ())):
        yield from files_of(source)
    yield from (other for other in file.parent.iterdir() if other.suffix in (".c", ".h"))


def imported(nodes: list[ast.AST]) -> Iterator[Path]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            around = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{around}{alias.name}" for alias in node.names):
                yield from run_by(_HOME_OF.get(name.removeprefix(f"{PACKAGE.name}."), name))


def run_by(name: str) -> Iterator[Path]:
    """The files that the import of a name runs, but for that of the whole package, which has no values."""
    parts = name.split(".")
    files = (file_of(".".join(parts[:count])) for count in range(1, len(parts) + 1))
    return (file for file in files if file and file != PACKAGE / "__init__.py")


def named(node: Any) -> Iterator[Path]:
    """The files of classes (`_target_`) and options in plain values."""
    if isinstance(node, str) and (option := OPTION.fullmatch(node)):
        yield from filter(Path.is_file, [CONF / option[1] / f"{option[2]}.yaml"])
    elif isinstance(node, Mapping):
        yield from run_by(node["_target_"]) if "_target_" in node else ()
    for each in [*node.values()] if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        yield from named(each)


def defaults(file: Path, node: Mapping[str, Any]) -> Iterator[Path]:
    """The files of conf/ that one builds on."""
    for entry in node.get("defaults", []):
        for group, choice in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            group, choice = (str(word).removeprefix("override ").split("@")[0] for word in (group, choice))
            folder = CONF / group[1:] if group.startswith("/") else file.parent / group
            yield from filter(Path.is_file, [folder / f"{choice}.yaml"])
