"""Kernels for a CPU in eager mode: each does what a plain path does, in fewer passes over memory.

``split`` cuts q, k and v out of their packed projection and rotates them in place, with one packed gradient;
``dense_bias`` writes an offset table out for all pairs of tokens; ``attend`` is attention whose bias learns, or in
bfloat16, ``attend_fused`` one whose mask no layer holds. Whoever calls them asks ``eager`` first, and has a plain path
for when it says no. What was measured is in docs/speed.md, by benchmarks/kernels.py. Legend as in ``attention.py``.
"""

from vitpos.kernels.attending import attend, attend_fused, attends_faster, explicit, sloped, spares_memory
from vitpos.kernels.dense import dense_bias, offsets
from vitpos.kernels.memory import Memory
from vitpos.kernels.rotating import backwards, cos_sin, rotated, split, turns, unit
from vitpos.kernels.when import eager, settled, transformed

__all__ = [
    "Memory",
    "attend",
    "attend_fused",
    "attends_faster",
    "backwards",
    "cos_sin",
    "dense_bias",
    "eager",
    "explicit",
    "offsets",
    "rotated",
    "settled",
    "sloped",
    "spares_memory",
    "split",
    "transformed",
    "turns",
    "unit",
]
