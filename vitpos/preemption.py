"""Signals that stop a run: an interrupt ends it at once, a scheduler's after the step in hand has been saved.

SIGINT (Ctrl-C) means at once. SIGTERM and SIGUSR1, which a scheduler sends before it takes the machine away, wait
until the step is finished and the state is saved; then the process ends with the code `SAVED`, which asks for the
same command again. Under submitit its own signal (SIGUSR2) does the same, and submitit then puts the job back in the
queue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

SAVED = 75  # exit code: stopped on request, saved, to be run again (EX_TEMPFAIL of sysexits.h)
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Stopped(BaseException):
    """A signal ended the run; its number, and a word on what was saved (None where nothing could be)."""

    def __init__(self, number: int, saved: str | None = None):
        super().__init__(number, saved)
        self.number, self.saved = number, saved

    @property
    def code(self) -> int:
        return 128 + self.number if self.saved is None else SAVED

    def __str__(self) -> str:
        number = signal.Signals(self.number)
        return WORDS.get(number, f"stopped by {number.name}") + (f": {self.saved}" if self.saved else "")


def stop(number: int, frame: Any) -> None:
    """Signal handler: end here."""
    raise Stopped(number)


@contextlib.contextmanager
def handling(handler: Any, *numbers: int) -> Iterator[dict[int, Any]]:
    """``handler`` for these signals within the block; yields those it stands in for. Only a main thread has any."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def requests() -> list[int]:
    """The signals that ask for an end after the step in hand, the gravest last."""
    numbers: list[int] = [signal.SIGTERM, signal.SIGUSR1]
    if "SUBMITIT_EXECUTOR" in os.environ:
        numbers.append(signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"])
    return numbers


class Request:
    """As a context manager: signals of a scheduler are noted, not obeyed. ``number`` is the gravest one's, or None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.numbers = requests()

    def __enter__(self) -> Request:
        self.stack = contextlib.ExitStack()
        self.before = self.stack.enter_context(handling(self._note, *self.numbers))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _note(self, number: int, frame: Any) -> None:
        if self.number is None or self.numbers.index(number) > self.numbers.index(self.number):
            self.number = number

    def forget(self, number: int) -> None:
        """That this signal has come; not one that has come since."""
        if self.number == number:
            self.number = None

    def obey(self, number: int, saved: str) -> None:
        """Hand the signal, now that the state is saved, to whoever handled it before; where nobody did, raise Stopped.

        Returns where that one wants the run to go on (submitit, of a SIGTERM, while it waits for its own signal).
        """
        before = self.before.get(number)
        if not callable(before) or before is stop:
            raise Stopped(number, saved)
        print(f"{signal.Signals(number).name}: {saved}", file=sys.stderr)
        before(number, None)
