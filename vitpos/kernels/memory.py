"""What evaluation keeps from one forward to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitpos.kernels.dense import dense_bias

REMEMBERED = 2**22  # entries up to which a dense bias is kept from one forward to the next


class Memory:
    """What one block was told in its latest evaluation, or all blocks alike, by the values it was made from: dense
    biases, and signals that follow from plain numbers.

    Values are compared, since optimizers change weights without a trace; what somebody wrote to is dropped, unless
    through ``.data`` or NumPy, which leave no trace either. Copies and pickles begin empty.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor | None, int, Tensor, int]] = {}
        self._signal: tuple[Any, Any, list[tuple[Tensor, int]]] | None = None

    def __reduce__(self) -> Any:
        return Memory, ()

    def forget(self) -> None:
        self._held.clear()
        self._signal = None

    def signal(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, an ``attention.Signal``, or returned when the key was the same."""
        if self._signal is not None:
            held, found, tensors = self._signal
            if held == key and all(tensor._version == version for tensor, version in tensors):
                return found
        with torch.inference_mode(False), torch.no_grad():  # what is made under inference mode has no version
            found = make()
        parts = (getattr(found.rotation, "turn", None), *(part.bias for part in found.parts))
        made = [t for t in parts if t is not None]
        if sum(tensor.numel() for tensor in made) <= REMEMBERED and not found.contextual:
            self._signal = key, found, [(tensor, tensor._version) for tensor in made]
        return found

    def dense_bias(self, place: int, table: Tensor, beside: Tensor | None, prefix: int) -> Tensor:
        """``dense_bias`` of the bias that is the ``place``-th of its block."""
        if torch.is_grad_enabled():
            return dense_bias(table, beside, prefix)
        held = self._held.get(place)
        if held is not None:
            old_table, old_beside, old_prefix, found, version = held
            same = old_prefix == prefix and _same(old_table, table) and _same(old_beside, beside)
            if same and found._version == version:
                return found
        with torch.inference_mode(False), torch.no_grad():  # what is made under inference mode has no version
            table, beside = table.clone(), None if beside is None else beside.clone()
            dense = dense_bias(table, beside, prefix)
            if dense.numel() <= REMEMBERED:
                self._held[place] = (table, beside, prefix, dense, dense._version)
        return dense


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)
