"""Statistics of the heads of attention, where several query heads share a key head, and parameters made of them."""

from torch import Tensor

from crt_exp.features.statistics import Statistics
from crt_exp.samplers.nested_tensors import Nested, mapped


def grouped_statistics(x: Tensor, y: Tensor, key_mask: Tensor | None = None, scale: float = 1.0,
                       same: bool = True) -> Statistics:
    """Of scale x and scale y of each (batch, key head), the query heads of a group together; a query at a padded place
    does not count where queries and keys are of the same sequence."""
    groups = x.shape[1] // y.shape[1]
    y_mask = None if key_mask is None else key_mask[:, None]
    x_mask = y_mask if same and x.shape[2] == y.shape[2] else None
    if groups > 1:
        x = x.unflatten(1, (y.shape[1], groups)).flatten(2, 3)
        x_mask = None if x_mask is None else x_mask.repeat(1, 1, groups)
    return Statistics.of(x, y, x_mask, y_mask, scale)


def for_query_heads(params: Nested, groups: int) -> Nested:
    """Parameters of key heads, repeated for the query heads of their groups."""
    if groups == 1:
        return params
    return mapped(lambda t: t if t.ndim < 3 else t.repeat_interleave(groups, -3), params)
