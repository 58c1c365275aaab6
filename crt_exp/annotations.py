"""The options of a class with their annotations, read from its source: importing its module may import torch."""

import ast
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VOCABULARY = ("typing", "collections.abc", "pydantic", "crt_exp.options")  # imported for their names


@cache
def annotations_in_source(target: str) -> dict[str, Any]:
    """Those of a class or function of this package, Any where an annotation needs more imports; {} of others."""
    try:
        module, node = definition(*target.rpartition(".")[::2])
    except (LookupError, OSError):
        return {}
    init = next((part for part in node.body if getattr(part, "name", "") == "__init__"), node)
    found: dict[str, Any] = {}
    if isinstance(node, ast.ClassDef) and (init is node or init.args.kwarg):  # further options are those of bases
        for base in reversed([base.id for base in node.bases if isinstance(base, ast.Name)]):
            found |= annotations_in_source(f"{module}.{base}")
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)] if node.decorator_list else []
    own = init.args.args + init.args.kwonlyargs if isinstance(init, ast.FunctionDef) else fields  # of a dataclass
    for part in own:
        name = part.arg if isinstance(part, ast.arg) else part.target.id
        found[name] = Any
        with suppress(NameError, ValueError):  # ValueError: there is none
            found[name] = eval(compile(ast.Expression(part.annotation), module, "eval"), source(module)[1])
    return found


def definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
    """The module and statement that define a name. Raises LookupError or OSError for others than of this package."""
    for node in source(module)[0]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(node.module, alias.name)
    raise LookupError(name)


@cache
def source(module: str) -> tuple[list[ast.stmt], dict[str, Any]]:
    """The statements of a module, and the names that it imports from the vocabulary or makes of these."""
    path, names = ROOT.joinpath(*module.split(".")), {}
    body = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body
    for node in body:
        if getattr(node, "module", "") in VOCABULARY or isinstance(node, ast.Assign | ast.ClassDef):
            with suppress(Exception):  # it needs more imports
                exec(compile(ast.Module([node], []), module, "exec"), names)
    return body, names
