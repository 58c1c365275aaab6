"""The options of a class with their annotations, read from its source: importing its module may import torch."""

import ast
import builtins
import functools
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

VOCABULARY = ("typing", "collections.abc", "pydantic", "crt_exp.options")  # imported for their names


@functools.cache
def annotations_in_source(target: str) -> dict[str, Any]:
    """Those of a class or function of this package, Any where an annotation needs more imports; {} of others."""
    try:
        module, node = definition(*target.rpartition(".")[::2])
    except (LookupError, OSError):
        return {}
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {}
    init = next((part for part in node.body if getattr(part, "name", "") == "__init__"), node)
    inherited = {}
    if isinstance(init, ast.ClassDef) or init is not node and init.args.kwarg:  # further options are those of bases
        for base in reversed([base.id for base in node.bases if isinstance(base, ast.Name)]):
            inherited |= annotations_in_source(f"{module}.{base}")
    if isinstance(init, ast.FunctionDef):
        own = {arg.arg: arg.annotation for arg in (*init.args.args, *init.args.kwonlyargs)}
    elif node.decorator_list or is_typed_dict(node):
        own = {part.target.id: part.annotation for part in node.body if isinstance(part, ast.AnnAssign)}
    else:
        own = {}
    return inherited | {name: hint(module, annotation) for name, annotation in own.items()}


def is_typed_dict(node: Any) -> bool:
    return (isinstance(node, ast.ClassDef) and all(isinstance(base, ast.Name) for base in node.bases)
            and all(isinstance(part, ast.AnnAssign | ast.Expr) for part in node.body))


def definition(module: str, name: str) -> tuple[str, Any]:
    """The module and statement that define a name. Raises LookupError or OSError where they are not of this package."""
    found = definitions(module)[name]
    return definition(*found) if isinstance(found, tuple) and found[0] not in VOCABULARY else (module, found)


@functools.cache
def definitions(module: str) -> dict[str, Any]:
    """Statements by the names that they define, and (module, name) of what a module imports."""
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
    try:
        return meaning(module, annotation)
    except (NameError, AttributeError, TypeError, LookupError, OSError):
        return Any


def meaning(module: str, expression: ast.expr) -> Any:
    """The value of an expression. Raises LookupError and others where it needs more imports."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} - {*dir(builtins)}
    values = {name: named(*definition(module, name), name) for name in names}
    return eval(compile(ast.Expression(expression), module, "eval"), values)


def named(module: str, node: Any, name: str) -> Any:
    if isinstance(node, tuple):
        return getattr(import_module(node[0]), node[1])
    if is_typed_dict(node):
        return TypedDict(name, annotations_in_source(f"{module}.{name}"))
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
        return [ast.literal_eval(key) for key in node.value.keys]
    if isinstance(node, ast.Assign):
        return meaning(module, node.value)
    raise LookupError(name)
