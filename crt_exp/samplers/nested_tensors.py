"""Nested noise and parameters: a noise or a tensor, or a tuple, named or not, with an entry for each part of a map.

None is an empty place: a parameter that a map does without, the noise of a map without projections.
"""

from collections.abc import Callable, Iterator
from typing import Any

Nested = Any  # a leaf, None, or a tuple of these


def leaves(tree: Nested) -> list:
    """All leaves in order, one that stands in several places as often."""
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [] if tree is None else [tree]


def mapped(function: Callable[[Any], Any], tree: Nested, empty: Any = None) -> Nested:
    """The same tree with function(leaf) for each leaf and `empty` in the empty places.

    A leaf that stands in several places gives one result, which stands in all of them: shared noises stay shared.
    """
    every, results = leaves(tree), {}
    for leaf in every:
        if id(leaf) not in results:
            results[id(leaf)] = function(leaf)
    return _rebuilt(tree, iter([results[id(leaf)] for leaf in every]), empty)


def shared(one: Nested, other: Nested) -> bool:
    """Whether some leaf stands in both."""
    return any(a is b for a in leaves(one) for b in leaves(other))


def _rebuilt(tree: Nested, results: Iterator, empty: Any) -> Nested:
    if isinstance(tree, tuple):
        parts = [_rebuilt(part, results, empty) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return empty if tree is None else next(results)
