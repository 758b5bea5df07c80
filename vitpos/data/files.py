"""Image files in class folders: found in sorted order, decoded to upright RGB."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from PIL import Image, ImageOps
from torchvision.datasets.folder import IMG_EXTENSIONS


def existing(root: str | None, name: str, may_be_new: bool = False) -> Path:
    if root is None:
        raise ValueError(f"data={name} needs data.root=FOLDER, where its images are")
    path = Path(os.path.expanduser(root))
    if not path.is_dir() and not may_be_new:
        raise FileNotFoundError(f"data.root={root} is not a folder")
    return path


def class_folders(base: Path) -> list[str]:
    try:
        classes = sorted(e.name for e in os.scandir(base) if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        _unreadable(error)
    if len(classes) < 2:
        raise ValueError(f"{base} holds {len(classes)} class folders; expected one folder a class, at least 2")
    return classes


def _unreadable(error: OSError) -> NoReturn:
    raise ValueError(f"cannot read folder {error.filename}: {error.strerror}") from None


def scan(base: Path, classes: list[str], parts: Sequence[str] = ()) -> tuple[list[Path], np.ndarray]:
    """Image paths of every class, in sorted order, and their labels int64 [N]; enough of each to carve ``parts``."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            Path(folder, f)
            for folder, _, files in os.walk(base / name, onerror=_unreadable)
            for f in files
            if f.lower().endswith(IMG_EXTENSIONS)
        )
        if not found:
            raise ValueError(f"class folder {base / name} holds no image ({', '.join(IMG_EXTENSIONS)})")
        if len(found) < len(parts):
            raise ValueError(
                f"class folder {base / name} holds {len(found)} image{'s' * (len(found) > 1)}; at least {len(parts)} "
                f"are needed to carve {', '.join(parts[:-1])} and {parts[-1]} from it"
            )
        paths += found
        labels += [label] * len(found)
    return paths, np.array(labels, np.int64)


def decode(source: Path | IO[bytes], name: str | None = None) -> Image.Image:
    """RGB, upright as its EXIF orientation says; transparent pixels are laid on white, 16-bit grey becomes 8-bit."""
    try:
        with Image.open(source) as image:
            mode = image.mode
            if mode in ("I", "F"):
                raise ValueError(f"its pixels are of mode {mode}, whose range is unknown; convert it to 8 or 16 bits")
            upright: Any = ImageOps.exif_transpose(image)
            if mode.startswith("I;16"):
                upright = Image.fromarray(np.round(np.asarray(upright) / 257).astype(np.uint8))
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
            return upright.convert("RGB")
    except Exception as error:  # Pillow raises many kinds: OSError, SyntaxError, struct.error, ...
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot decode image {name or source}: {reason}; replace or remove it") from None
