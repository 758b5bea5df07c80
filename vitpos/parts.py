"""An evaluation in parts: shared among processes, and kept as they are measured, so that one that was stopped goes on.

A part is some batches under all conditions of a sweep, or a whole probe. Its arrays are those of a single process that
never stopped, bit for bit: batches are composed alike, and each part is measured by one process from start to end.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitpos import report

Arrays = dict[str, NDArray[Any]]
FOLDER = ".parts"  # in the folder of a model's results


class Processes:
    """Those that torchrun has started, or the one that there is. What they exchange goes through their CPUs."""

    def __init__(self) -> None:
        self.rank, self.count = (int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        if self.count > 1:
            torch.distributed.init_process_group("gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """The values of all processes, in every one."""
        if self.count == 1:
            return [value]
        values = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values

    def agree(self, value: Any) -> Any:
        """The first one's value."""
        return self.exchange(value)[0]

    def close(self) -> None:
        if self.count > 1:
            torch.distributed.destroy_process_group()


class Parts:
    """The parts of one model's evaluation. Without `folder` nothing is kept, without `processes` nothing is shared.

    They are kept in a folder of their own, called `identity`: everything that they depend on. Parts of anything else
    that lie there are removed.
    """

    def __init__(self, folder: Path | None = None, identity: str = "", processes: Processes | None = None) -> None:
        self.root, self.processes = folder, processes
        self.folder = None if folder is None else folder / FOLDER / identity
        self.calls = 0
        self.created: list[Path] = []
        if self.root is not None and (processes is None or processes.first):
            for other in (self.root / FOLDER).glob("*"):
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)

    def each(self, names: Sequence[str], measure: Callable[[list[int]], Iterable[Arrays]]) -> list[Arrays]:
        """The arrays of every part. `measure` yields those of the parts with these numbers, in turn; it is asked for
        what this process has to do and is not kept yet. All processes call this alike, in the same order."""
        self.calls += 1
        files = [f"{self.calls:03d}-{re.sub('[^a-z0-9]+', '-', name.lower())}-{i:04d}" for i, name in enumerate(names)]
        rank, count = (0, 1) if self.processes is None else (self.processes.rank, self.processes.count)
        found = {i: kept for i in range(rank, len(names), count) if (kept := self._kept(files[i])) is not None}
        missing = [i for i in range(rank, len(names), count) if i not in found]
        if missing:
            for i, arrays in zip(missing, measure(missing), strict=True):
                self._keep(files[i], arrays)
                found[i] = arrays
        for others in [found] if self.processes is None else self.processes.exchange(found):
            found |= others
        return [found[i] for i in range(len(names))]

    def _kept(self, name: str) -> Arrays | None:
        if self.folder is None:
            return None
        try:
            with np.load(self.folder / f"{name}.npz", allow_pickle=False) as file:
                return dict(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):  # none, or one that the disk has damaged
            return None

    def _keep(self, name: str, arrays: Arrays) -> None:
        if self.root is not None and self.folder is not None:
            self.created = self.created or [path for path in (self.root, *self.root.parents) if not path.exists()]
            report.write(self.folder / f"{name}.npz", pack(arrays))

    def discard(self) -> None:
        """Remove them, and the folders that were made for them alone."""
        if self.root is not None and (self.processes is None or self.processes.first):
            shutil.rmtree(self.root / FOLDER, ignore_errors=True)
            for folder in (self.root, *self.created):
                with contextlib.suppress(OSError):  # other things are in it
                    folder.rmdir()


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as the content of an .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
