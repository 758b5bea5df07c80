"""State files: whole or not at all, verified when they are read, and two of them kept.

``state-<step>-<digest>.pt`` carries the BLAKE2b of its own content in its name, so that one rename makes it appear
complete and a file that was cut short or changed afterwards is known by its name alone.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

DIGEST = 8  # bytes
PATTERN = "state-*.pt"


class _Hashing(io.BufferedWriter):
    """A new file that hashes what is written to it, and keeps the error that torch would make unreadable."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "wb"))
        self.hash = hashlib.blake2b(digest_size=DIGEST)
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self.hash.update(content)
        try:
            return super().write(content)
        except OSError as error:
            self.error = error
            raise


def write(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write one more state file and return its path; OSError where it cannot be, the others untouched."""
    temporary = folder / f".saving-state-{os.getpid()}"
    try:
        with _Hashing(temporary) as file:
            try:
                torch.save(state, file)
            except RuntimeError:
                raise (file.error or OSError("torch cannot write it")) from None
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"state-{step:08d}-{file.hash.hexdigest()}.pt"
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def keep(folder: Path, *paths: Path | None) -> None:
    """Remove all state files but these."""
    for path in set(folder.glob(PATTERN)) - set(paths):
        path.unlink()


def whole(path: Path) -> bool:
    """Whether a state file holds what it held when it was written."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST)).hexdigest()  # type: ignore[arg-type]
    return path.stem.endswith(f"-{digest}")


def newest(folder: Path) -> tuple[Path | None, list[Path]]:
    """The newest whole state file of a folder, if there is one, and the damaged ones that are newer."""
    damaged: list[Path] = []
    for path in sorted(folder.glob(PATTERN), key=_age, reverse=True):
        if whole(path):
            return path, damaged
        damaged.append(path)
    return None, damaged


def _age(path: Path) -> tuple[int, int]:
    return int(path.stem.split("-")[1]), path.stat().st_mtime_ns
