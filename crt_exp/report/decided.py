"""What decides a cell: the statements that its function reaches, and the configuration that these and its key name.

A value is decided by the function that computes it, by the module-level statements that this function reads by name
(constants, functions, classes), by what those read, and so on, in whichever module they stand: nothing is listed by
hand, and what a page is made of decides no cell. Configuration builds objects from names, so names in strings count:

- "crt_exp.features.OPRF" is that class;
- a choice of conf/features, conf/sampler or conf/attention, such as "oprf", is that file with the targets it names;
- "task=ptb" is that file of conf/task, likewise for all groups that only a command line names; code that reaches
  `crt_exp.train` starts runs, and with that come the groups that conf/config.yaml chooses.

Too much may count (a class counts with all its methods, an imported module with all its statements, C sources and
headers with every module of their folder), and then a cell is computed once more than needed; too little is counted
only where a name is put together from pieces while the program runs. Comments, docstrings and line breaks count for
nothing. Libraries are no part of it: their versions stand in the cell.
"""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from crt_exp.config import CONF

PACKAGE = "crt_exp"
RUNS = f"{PACKAGE}.train"
BY_WORD = ("features", "sampler", "attention")  # groups whose choices the library takes by their bare names
ALL = "*"     # of a module's names: every statement
EFFECT = ""   # statements that bind no name


class Node(NamedTuple):
    """The statements of a module that bind a name; of a file of conf/ its path from there, and no name."""

    place: str
    name: str | None = None


@dataclass(frozen=True)
class Content:
    """What a node is, as text for a digest, and what it names."""

    text: str
    names: frozenset[Node]


class Code:
    """A package and its conf/ as a graph of statements. root: the folder that holds crt_exp."""

    def __init__(self, root: Path, conf: Path):
        self.conf = conf
        self.homes = {PACKAGE: root / PACKAGE}  # by the first part of a module's name: a folder, or one file
        self.modules: dict[str, Module | None] = {}
        self.contents: dict[Node, Content] = {}
        self.digests: dict[tuple[Node, frozenset[Node]], str] = {}

    def of_cell(self, compute: Callable[..., Any], key: Any) -> str:
        """A digest of all that decides compute(**key) but the key itself.
        Raises ValueError for a function without a source."""
        name = compute.__module__
        self.enter(name.partition(".")[0])
        if self.module(name) is None or "." in compute.__qualname__:
            raise ValueError(f"{compute!r} is no function at the top of a module with a source: what decides its "
                             "values cannot be told")
        return self.digest(Node(name, compute.__qualname__), self.named_in([json.dumps(key)]))

    def of_run(self, overrides: Sequence[str]) -> str:
        """A digest of all that decides `python -m crt_exp` with these arguments, but for themselves."""
        return self.digest(Node(RUNS, "main"), self.named_in(overrides))

    def digest(self, start: Node, more: frozenset[Node]) -> str:
        if (start, more) not in self.digests:
            texts = sorted(f"{node}\n{self.content(node).text}" for node in self.reached(start, more))
            self.digests[start, more] = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
        return self.digests[start, more]

    def reached(self, start: Node, more: Iterable[Node] = ()) -> set[Node]:
        found, waiting = set(), [start, *more]
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found.add(node)
            waiting += self.content(node).names
            waiting += [Node("config.yaml")] if node.place == RUNS else []
        return found

    def content(self, node: Node) -> Content:
        if node not in self.contents:
            self.contents[node] = self.of_file(node.place) if node.name is None else self.of_name(node)
        return self.contents[node]

    # ---- statements

    def enter(self, top: str) -> None:
        """Follows the names of one more package or module, that of a report which stands elsewhere."""
        module = sys.modules.get(top)
        file, folders = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
        if top not in self.homes and (folders or file):
            self.homes[top] = Path(folders[0] if folders else file)

    def module(self, name: str) -> "Module | None":
        """None for modules of other packages than this one and those that were entered."""
        if name not in self.modules:
            path = self.path_of(name)
            self.modules[name] = Module(name, path) if path is not None else None
        return self.modules[name]

    def path_of(self, name: str) -> Path | None:
        top, _, rest = name.partition(".")
        if top not in self.homes:
            return None
        path = self.homes[top].joinpath(*rest.split(".")) if rest else self.homes[top]
        return next((p for p in (path, path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)

    def of_name(self, node: Node) -> Content:
        module = self.module(node.place)
        known = node.name if node.name == ALL or node.name in module.bound else ALL  # ALL: its __getattr__ makes it
        statements = module.statements if known == ALL else module.bound[known]
        names = set().union(*(self.imported(s, node.name) if is_import(s) else self.read_by(s, module)
                              for s in statements))
        names |= {Node(parent, EFFECT) for parent in parents(node.place) if self.module(parent)}
        texts = [" ".join(stands_for(s, node.name)) if is_import(s) else dumped(s) for s in statements]
        text = "\n".join([*texts, *(module.beside if node.name == EFFECT else [])])
        return Content(text, frozenset(names - {node}))

    def read_by(self, statement: ast.stmt, module: "Module") -> set[Node]:
        found, strings = set(), []
        for part in ast.walk(without_docstrings(statement)):
            if isinstance(part, ast.Name) and part.id in module.bound:
                found.add(Node(module.name, part.id))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                strings.append(part.value)
            elif isinstance(part, (ast.Import, ast.ImportFrom)):
                found |= self.imported(part)
        return found | self.named_in(strings)

    def imported(self, statement: ast.Import | ast.ImportFrom, name: str = ALL) -> set[Node]:
        return self.named(stands_for(statement, name))

    def named(self, dotted: Iterable[str]) -> set[Node]:
        """The module, or the name within one, of each that has a source."""
        found = set()
        for name in dotted:
            outer, _, inner = name.rpartition(".")
            if self.module(name) is not None:
                found.add(Node(name, ALL))
            elif outer and self.module(outer) is not None:
                found.add(Node(outer, inner))
        return found

    # ---- names in strings, and configuration

    def named_in(self, strings: Iterable[str]) -> frozenset[Node]:
        found: set[Node] = set()
        for text in strings:
            found |= self.named(re.findall(rf"\b{PACKAGE}(?:\.\w+)+", text))
            found |= {Node(path) for word in re.findall(r"[\w/]+", text) for path in self.by_word.get(word, ())}
            found |= {self.files[pair] for pair in re.findall(r"(\w+)=(\w+)", text) if pair in self.files}
        return frozenset(found)

    @cached_property
    def files(self) -> dict[tuple[str, str], Node]:
        """(group, choice) -> its file."""
        paths = [path.relative_to(self.conf) for path in sorted(self.conf.rglob("*.yaml"))]
        return {(path.parts[0], "/".join(path.with_suffix("").parts[1:])): Node(str(path))
                for path in paths if len(path.parts) > 1}

    @cached_property
    def by_word(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for (group, choice), node in self.files.items():
            if group in BY_WORD:
                found.setdefault(choice, []).append(node.place)
        return found

    def defaults(self, path: str) -> set[Node]:
        """What the defaults list of a file of conf/ names; but for the task of config.yaml: runs name their own."""
        found = set()
        for entry in self.loaded(path).get("defaults", ()):
            pairs = entry.items() if isinstance(entry, dict) else [(f"/{path.split('/')[0]}", str(entry))]
            found |= {self.files[pair] for key, choice in pairs
                      if (pair := (re.sub(r"^override |@.*$|/", "", key), str(choice).partition("@")[0])) in self.files
                      and (path, pair[0]) != ("config.yaml", "task")}
        return found

    def loaded(self, path: str) -> dict[str, Any]:
        found = yaml.safe_load((self.conf / path).read_text(encoding="utf-8")) or {}
        return {key: value for key, value in found.items() if key != "hydra"}  # directories and the text of --help

    def of_file(self, path: str) -> Content:
        text = json.dumps(self.loaded(path), sort_keys=True)
        targets = self.named(re.findall(rf"\b{PACKAGE}(?:\.\w+)+", text))
        return Content(text, frozenset(self.defaults(path) | targets))


class Module:
    """A file of Python: the statements at its top by the names that they bind."""

    def __init__(self, name: str, path: Path):
        self.name = name
        self.statements = ast.parse(path.read_text(encoding="utf-8")).body
        sources = sorted(path.parent.glob("*.[ch]"))
        self.beside = [without_comments(source.read_text(encoding="utf-8")) for source in sources]
        self.bound: dict[str, list[ast.stmt]] = {EFFECT: []}
        for statement in self.statements:
            for name in binds(statement) or ([] if is_text(statement) else [EFFECT]):
                self.bound.setdefault(name, []).append(statement)


def binds(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a meaning; of a compound one, such as try, those inside it."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    found = []
    for part in ast.walk(statement):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.append(part.id)
        elif isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            found.append(part.name)
        elif isinstance(part, ast.alias):
            found.append(part.asname or part.name.partition(".")[0])
    return list(dict.fromkeys(found))


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_import(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Import, ast.ImportFrom))


def parents(module: str) -> list[str]:
    """"a.b.c" -> a, a.b, a.b.c: all of them run where the last one is imported."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def stands_for(statement: ast.Import | ast.ImportFrom, name: str) -> list[str]:
    """What an import binds that name to; the other names on its line decide nothing."""
    before = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
    return [before + alias.name for alias in statement.names
            if name in (ALL, alias.asname or alias.name.partition(".")[0])]


def without_comments(c: str) -> str:
    """C sources, whose comments and line breaks decide nothing."""
    return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", c, flags=re.DOTALL).split())


def dumped(statement: ast.stmt) -> str:
    return ast.dump(without_docstrings(statement))


def without_docstrings(tree: ast.AST) -> ast.AST:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body[0].value.value = ""
    return tree


HERE = Code(Path(__file__).parent.parent.parent, CONF)
