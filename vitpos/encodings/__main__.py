"""Look at encodings from the command line.

python -m vitpos.encodings                                   the overview table, in Markdown
python -m vitpos.encodings NAME ...                          what an encoding is
python -m vitpos.encodings SPEC --grid 7x11 [--out FILE]     a figure of what it does on a grid (SPEC.png)
python -m vitpos.encodings SPEC --cycles 14x14               how often each of its phases turns around over an image
python -m vitpos.encodings --docs FOLDER                     all pages and figures of the documentation
"""

import argparse
import sys
from pathlib import Path

from vitpos import pages
from vitpos.encoding import describe
from vitpos.spec import parse


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vitpos.encodings", description="Look at encodings.")
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="an encoding, such as rope_axial(theta=50.0)")
    parser.add_argument("--grid", metavar="HxW", help="draw a figure on this grid, such as 7x11")
    parser.add_argument("--cycles", metavar="HxW", help="list the cycles of its phases over an image of HxW patches")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the figure goes (default: SPEC.png)")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write all pages and figures there")
    given = parser.parse_args()
    try:
        if given.docs:
            pages.write(given.docs)
        elif given.grid:
            _draw(given.specs, _size("--grid", given.grid), given.out)
        elif given.cycles:
            size = _size("--cycles", given.cycles)
            print("\n\n".join(pages.spectrum(spec, size) for spec in given.specs))
        else:
            names = [name for spec in given.specs for name in parse(spec).names]
            print("\n\n".join(map(describe, names)) or pages.overview())
    except (ValueError, TypeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _size(option: str, size: str) -> tuple[int, int]:
    sides = size.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"{option} {size!r} must be HxW in patches, such as 7x11")
    return int(sides[0]), int(sides[1])


def _draw(specs: list[str], size: tuple[int, int], out: Path | None) -> None:
    if not specs or (out and len(specs) > 1):
        raise ValueError("--grid draws the specs given before it; --out names the file of one")
    for spec in specs:
        path = out or Path(f"{str(parse(spec)).replace(' ', '')}.png")
        pages.draw(spec, size).savefig(path)
        print(path)


if __name__ == "__main__":
    sys.exit(main())
