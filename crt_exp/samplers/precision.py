"""What is computed in the precision of its tensors, whatever torch.autocast would choose."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def as_given(t: Tensor) -> AbstractContextManager:
    """No autocast on the device of this tensor; the meta device, which computes nothing, has none."""
    return nullcontext() if t.is_meta else torch.autocast(t.device.type, enabled=False)
