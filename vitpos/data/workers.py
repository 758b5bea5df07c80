"""Images read in worker processes; errors and signals reach the user once, in the main process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
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
        worker_init_fn=_obey_the_main_process,
    )
    with _signals_wait():
        batches = iter(loader)
    for number, images in enumerate(batches, 1):
        if isinstance(images, Exception):
            try:
                raise images
            finally:
                del images, batches  # else its traceback would hold itself, and the workers with it
        if number == len(wanted):
            next(batches, None)  # ends the workers here; else __del__ may, where signals are lost
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
    """Signals that end a run are handled after the block: an exception raised while a process forks is lost.

    Processes that start in it begin with SIGTERM blocked, so that none reaches one before it is ready for it.
    """
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    try:
        with preemption.handling(lambda number, _: arrived.append(number), *numbers):
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def _obey_the_main_process(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal, and a scheduler may signal every process of a job: the main one
    alone answers, and ends its workers. Where one is stuck, or an error leaves no other way, it does so by SIGTERM.
    """
    for number in {signal.SIGINT, *preemption.requests()} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    main = multiprocessing.parent_process()
    if main is None or not hasattr(signal, "sigwaitinfo"):  # on macOS SIGTERM ends it, whoever sends it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a handler in Python is not told who sent it
    threading.Thread(target=_end_when_told, args=(main.pid,), daemon=True).start()


def _end_when_told(main: int) -> None:
    """By the main process, or by anyone when that is dead."""
    parent = os.getppid()
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != main and os.getppid() == parent:
        pass
    os._exit(0)


def _collate(items: list[Tensor | Exception]) -> Tensor | Exception:
    return next((i for i in items if isinstance(i, Exception)), None) or torch.stack(items)  # type: ignore[arg-type]
