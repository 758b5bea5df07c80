"""Images read in worker processes; errors and interrupts reach the user once, in the main process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vitpos import preemption


def read_batches(
    read: Callable[[Any], Tensor], wanted: Sequence[Sequence[Any]], workers: int, pin_memory: bool
) -> Iterator[Tensor]:
    """``read(item)`` for the items of each batch in turn, stacked; by ``workers`` processes (0: this one).

    A ValueError in ``read`` is raised here, whichever process read. ``read`` reaches workers by fork or pickle.
    """
    loader = torch.utils.data.DataLoader(
        _Reader(read),
        batch_sampler=wanted,  # type: ignore[arg-type]  # (of whatever items)
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_interrupts,
    )
    with _signals_wait():
        batches = iter(loader)
    for images in batches:
        if isinstance(images, Exception):
            raise images
        yield images


class _Reader(torch.utils.data.Dataset):
    def __init__(self, read: Callable[[Any], Tensor]):
        self.read = read

    def __getitem__(self, item: Any) -> Tensor | Exception:
        try:
            return self.read(item)
        except ValueError as error:  # raised in a worker, it would reach the user inside a traceback
            return error


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that end a run are handled after the block: an exception raised while a process forks is lost."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    try:
        with preemption.handling(lambda number, _: arrived.append(number), *numbers):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the main one ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collate(items: list[Tensor | Exception]) -> Tensor | Exception:
    return next((i for i in items if isinstance(i, Exception)), None) or torch.stack(items)  # type: ignore[arg-type]
