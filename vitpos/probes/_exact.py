"""Identities that hold exactly or not at all, tried in float64 on the model's logits. Not a probe."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

TOLERANCE = 1e-12  # relative; what is left of summation order in float64, with room for deep models


def relative_change(logits: Tensor, reference: Tensor) -> NDArray[np.float64]:
    """[b]: the largest absolute change of a logit over the largest absolute logit of the reference, both [b, K]."""
    scale = reference.abs().amax(1)
    return ((logits - reference).abs().amax(1) / scale.where(scale > 0, 1.0)).double().numpy()


def certificate(change: ArrayLike) -> dict[str, Any]:
    """Whether an identity holds, from relative changes [S, n] of S trials on n images each."""
    values = np.atleast_2d(np.asarray(change, dtype=np.float64))
    largest = float(values.max())
    return {
        "largest": largest,
        "tolerance": TOLERANCE,
        "holds": largest <= TOLERANCE,
        "trials": values.shape[0],
        "images": values.shape[1],
    }


def verdict(entry: dict[str, Any]) -> str:
    """A certificate in a word or two."""
    if "not_applicable" in entry:
        return "not applicable"
    return "holds" if entry["holds"] else "fails"
