"""Validation and test parts drawn from labelled samples, classes in proportion."""

from __future__ import annotations

import numpy as np

from vitpos import seeds


def stratified(labels: np.ndarray, keys: np.ndarray, size: int, base: int) -> np.ndarray:
    """bool [N]: ``size`` samples drawn by (base, key), classes in proportion (one at least, never all)."""
    chosen = np.zeros(len(labels), bool)
    rank = seeds.uniform(base, keys, 1)[:, 0]
    classes, totals = np.unique(labels, return_counts=True)
    if totals.min() < 2:
        raise ValueError(f"class {classes[totals.argmin()]} has a single image; a split needs at least 2 a class")
    exact = totals * size / len(labels)
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: size - counts.sum()]] += 1  # largest remainders
    for label, count in zip(classes, np.clip(counts, 1, totals - 1)):
        members = np.flatnonzero(labels == label)
        chosen[members[np.argsort(rank[members], kind="stable")[:count]]] = True
    return chosen


def carve(labels: np.ndarray, ids: list[str], fraction: float, seed: int, split: str) -> np.ndarray:
    """Indices of the train or the val part of the training images."""
    size = round(fraction * len(ids))
    in_val = stratified(labels, seeds.sample_keys(ids), size, seeds.stream(seed, "split"))
    return np.flatnonzero(in_val if split == "val" else ~in_val)
