"""How large the tensors are that a computation makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator makes."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.numel())
        return output
