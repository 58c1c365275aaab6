"""The options of a class with their annotations, read from its source: importing its module may import torch."""

import ast
import builtins
import functools
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

VOCABULARY = ("typing", "collections.abc", "crt_exp.hints")  # modules whose names annotations consist of


@functools.cache
def options_in_source(target: str) -> dict[str, Any]:
    """Those of a class or function of this package, Any where an annotation needs more imports; {} of others."""
    try:
        module, node = definition(*target.rpartition(".")[::2])
    except (LookupError, OSError):
        return {}
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {}
    init = next((part for part in node.body if getattr(part, "name", "") == "__init__"), node)
    found = {}
    if isinstance(init, ast.ClassDef) or init is not node and init.args.kwarg:  # further options are those of bases
        for base in reversed([base.id for base in node.bases if isinstance(base, ast.Name)]):
            found |= options_in_source(f"{module}.{base}")
    if isinstance(init, ast.ClassDef):
        return found | (fields(module, node) if node.decorator_list else {})  # of a dataclass
    return found | {arg.arg: hint(module, arg.annotation) for arg in (*init.args.args, *init.args.kwonlyargs)}


def fields(module: str, node: ast.ClassDef) -> dict[str, Any]:
    return {part.target.id: hint(module, part.annotation) for part in node.body if isinstance(part, ast.AnnAssign)}


def definition(module: str, name: str) -> tuple[str, Any]:
    """The module and statement that define a name. Raises LookupError or OSError where they are not of this package."""
    found = definitions(module)[name]
    return definition(*found) if isinstance(found, tuple) and found[0] not in VOCABULARY else (module, found)


@functools.cache
def definitions(module: str) -> dict[str, Any]:
    path, found = Path(__file__).parent.parent.joinpath(*module.split(".")), {}
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.ImportFrom():
                found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found[name] = node
    return found


def hint(module: str, annotation: ast.expr | None) -> Any:
    """The meaning of an annotation."""
    try:
        return meaning(module, annotation)
    except (NameError, AttributeError, TypeError, LookupError, OSError):
        return Any


def meaning(module: str, expression: ast.expr) -> Any:
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} - {*dir(builtins)}
    return eval(compile(ast.Expression(expression), module, "eval"), {name: named(module, name) for name in names})


def named(module: str, name: str) -> Any:
    module, node = definition(module, name)
    if isinstance(node, tuple):
        return getattr(import_module(node[0]), node[1])
    if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["TypedDict"]:
        return TypedDict(name, fields(module, node))
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
        return [ast.literal_eval(key) for key in node.value.keys]
    if isinstance(node, ast.Assign):
        return meaning(module, node.value)
    raise LookupError(name)
