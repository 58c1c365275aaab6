"""Values against the annotations that a source says, without importing it: torch takes seconds, and a mistyped value is
said before.

What cannot be read in this way, such as a class of one's own, is left to `check_plain`, which looks at everything.
"""

import ast
import builtins
import collections.abc
import functools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crt_exp
from crt_exp import options
from crt_exp.runner.configuration import GROUPS
from crt_exp.options import check

WORDS = vars(builtins) | vars(typing) | vars(collections.abc) | vars(options)  # that annotations are made of
PACKAGE = Path(crt_exp.__file__).parent
UNKNOWN = (NameError, AttributeError, TypeError)  # of what takes other words


def check_values(given: dict[str, Any]) -> None:
    """Raises ConfigError for the first value of a plain configuration that does not fit; keys are not looked at."""
    for name, group in GROUPS.items():
        node = given.get(name)
        if isinstance(node, dict) and "_target_" in node:
            extra = {} if group.parts else {key: parameter.hint for key, parameter in group.extra.items()}
            for key, hint in (written_hints(node["_target_"]) | extra).items():
                if key in node:
                    check(f"{name}.{key}", node[key], hint)


@functools.cache
def written_hints(place: str) -> dict[str, Any]:
    """Of the parameters of a class or function of this package, as far as they are plain types and bounds."""
    module, node = found(*place.rpartition(".")[::2])
    return parameters_of(module, node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else {}


def parameters_of(module: str, node: ast.ClassDef | ast.FunctionDef) -> dict[str, Any]:
    """Those of a class are its __init__'s, or its fields behind those of its bases."""
    made = node
    if isinstance(node, ast.ClassDef):
        made = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if made is not None:
        return dict(understood(module, ((arg.arg, arg.annotation) for arg in (*made.args.args, *made.args.kwonlyargs))))
    result = {}
    for base in reversed(node.bases):
        there, parent = found(module, base.id) if isinstance(base, ast.Name) else (module, None)
        result |= parameters_of(there, parent) if isinstance(parent, ast.ClassDef) else {}
    fields = ((part.target.id, part.annotation) for part in node.body if isinstance(part, ast.AnnAssign))
    return result | dict(understood(module, fields))


def understood(module: str, written: Iterator[tuple[str, ast.expr | None]]) -> Iterator[tuple[str, Any]]:
    """Names with what their annotations mean."""
    for name, annotation in written:
        try:
            if annotation is not None:
                yield name, meaning(module, annotation)
        except UNKNOWN:
            continue


def meaning(module: str, written: ast.expr) -> Any:
    return eval(compile(ast.Expression(written), module, "eval"), {"__builtins__": {}}, Names(module))


class Names(dict):
    """What the names in an annotation of a module stand for, looked up when asked for."""

    def __init__(self, module: str):
        super().__init__(WORDS)
        self.module = module

    def __missing__(self, name: str) -> Any:
        there, node = found(self.module, name)
        if not isinstance(node, ast.Assign):
            raise KeyError(name)
        return meaning(there, node.value)


def found(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """The module and statement that define a name, through imports; None where it is not of this package."""
    for node in getattr(tree(module), "body", ()):
        match node:
            case ast.ImportFrom(module=there, names=names):
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        return found(there or "", alias.name)
            case ast.Assign(targets=[ast.Name(id=other)]) | ast.ClassDef(name=other) | ast.FunctionDef(name=other):
                if other == name:
                    return module, node
    return module, None


@functools.cache
def tree(module: str) -> ast.Module | None:
    first, *parts = module.split(".")
    path = PACKAGE.joinpath(*parts)
    files = (path.with_suffix(".py"), path / "__init__.py") if first == crt_exp.__name__ else ()
    return next((ast.parse(file.read_text()) for file in files if file.is_file()), None)
