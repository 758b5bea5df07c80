"""Files written whole or not at all, and result sets read from them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

SCHEMA = "vitpos.results/1"


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        whole = Path(folder) / path.name
        whole.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(whole, path)
    return path


def to_json(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=1, allow_nan=False) + "\n"


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A stored result set; ValueError if it is none, or of another version of the schema."""
    try:
        results = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        found = results.get("schema") if isinstance(results, dict) else type(results).__name__
        raise ValueError(f"{path} has schema {found!r}, expected {SCHEMA!r}")
    return results
