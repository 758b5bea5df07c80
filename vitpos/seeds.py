"""Named random streams: every random draw of a run has a name and a key, and nothing else decides its value.

One integer seed opens independent streams ("backbone", "encoding", "order", "augment", "regularize", ...).
What one stream draws never moves another, so two runs that differ in the encoding alone start from the same
backbone weights and see the same batches, augmentations and dropout masks; and because draws are keyed by
(seed, epoch, step or sample id), the position in training is two integers, whatever the number of processes.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

MASK63 = (1 << 63) - 1


def stream(seed: int, name: str, *keys: int) -> int:
    """63-bit integer that depends on (seed, name, keys) alone: the same in every process and version.

    >>> stream(0, "order", 3) == stream(0, "order", 3), stream(0, "order", 3) == stream(0, "augment", 3)
    (True, False)
    """
    for value in (seed, *keys):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"a seed and its keys are integers, got {value!r} ({type(value).__name__})")
    text = "/".join([str(int(seed)), name, *(str(int(k)) for k in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & MASK63


def generator(seed: int, name: str, *keys: int) -> torch.Generator:
    """CPU generator at the start of the stream (seed, name, keys)."""
    return torch.Generator().manual_seed(stream(seed, name, *keys))


def seed_all(start: int) -> None:
    """Put Python's, NumPy's and PyTorch's own generators, of all devices, at ``start``."""
    random.seed(start)
    np.random.seed(start & 0xFFFFFFFF)  # noqa: NPY002
    torch.manual_seed(start)


@contextlib.contextmanager
def global_generators(start: int) -> Iterator[None]:
    """Python's, NumPy's and PyTorch's own generators at ``start`` inside the block, and as they were after it.

    For libraries that draw from them; PyTorch's on the CPU only.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(start)
    np.random.seed(start & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(start)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def sample_keys(ids: list[str]) -> np.ndarray:
    """uint64 [N]: one key a sample id, to be used with `uniform`."""
    digests = (hashlib.blake2b(i.encode(), digest_size=8).digest() for i in ids)
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def uniform(base: int, keys: np.ndarray, draws: int) -> np.ndarray:
    """float64 [N, draws] in [0, 1): row n depends on (base, keys[n]) alone, whatever else is in the batch.

    Counter-based: splitmix64 (Steele, Lea, Flood 2014) on base, key and draw number.
    """
    with np.errstate(over="ignore"):
        start = _splitmix(keys.astype(np.uint64) ^ _splitmix(np.array([base], np.uint64)))  # [N]
        steps = np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = _splitmix(start[:, None] + steps[None, :])  # [N, draws]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(base: int, keys: np.ndarray, highs: tuple[int, ...]) -> np.ndarray:
    """int64 [N, len(highs)]: column j uniform in 0..highs[j]-1, keyed as in `uniform`."""
    return (uniform(base, keys, len(highs)) * np.array(highs)).astype(np.int64)


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
