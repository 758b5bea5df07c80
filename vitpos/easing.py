"""Encodings that come and go while a model trains: what a gate multiplies, and how much is left of what fades."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitpos.encoding import Angles, OffsetTable, PairBias, SeparableAngles

WHOLE = 1 << 16  # what has faded is counted in whole parts: an average of weights copies whole numbers


def gated(given: Any, gate: Tensor) -> Any:
    """What an encoding returned, times its ``gate`` [h] (angles and biases) or [1] (token vectors).

    >>> table = OffsetTable(torch.tensor([[[2.0]], [[4.0]]]))
    >>> gated(table, torch.tensor([0.5, 0.0])).values.flatten().tolist()
    [1.0, 0.0]
    """
    if isinstance(given, Angles):
        return replace(given, phase=given.phase * gate.to(given.phase.dtype).view(1, -1, 1, 1))
    if isinstance(given, SeparableAngles):
        y, x = (part * gate.to(part.dtype).view(-1, 1, 1) for part in (given.y, given.x))
        return replace(given, y=y, x=x, units=None)
    if isinstance(given, (OffsetTable, PairBias)):
        shape = (-1, 1, 1) if isinstance(given, OffsetTable) else (1, -1, 1, 1)
        prefix = None if given.prefix is None else given.prefix * gate.to(given.prefix.dtype).unsqueeze(-1)
        return replace(given, values=given.values * gate.to(given.values.dtype).view(shape), prefix=prefix)
    return given * gate.to(given.dtype)


def left(faded: Tensor, like: Tensor) -> Tensor:
    """The share, 1 to 0, that is left of what fades, in the dtype of ``like``."""
    exact = torch.promote_types(like.dtype, torch.float32)  # WHOLE is beyond float16
    return (1 - faded.to(exact) / WHOLE).to(like.dtype)


def parts(share: float) -> int:
    """``faded`` at which this share is left. ValueError unless it lies in 0..1.

    >>> parts(1.0), parts(0.0), left(torch.tensor(parts(0.25)), torch.ones(1)).item()
    (0, 65536, 0.25)
    """
    if not isinstance(share, (int, float)):
        raise TypeError(f"the share that is left of a fading encoding is a number in 0..1, got {share!r}")
    if not 0 <= share <= 1:
        raise ValueError(f"the share that is left of a fading encoding lies in 0..1, got {share!r}")
    return round((1 - share) * WHOLE)
