"""``python -m vitpos.encodings`` prints the overview table in Markdown; with a name, what that encoding is."""

import sys

from vitpos.encoding import LAWS, describe, law_state
from vitpos.spec import REGISTRY, list_encodings, parse


def overview() -> str:
    """One row an encoding: what it is, where it acts, its options, the laws that hold, its source."""
    rows = ["| encoding | what it is | acts on | weights | exactly invariant to | source |", "| --- " * 6 + "|"]
    for name in list_encodings():
        cls = REGISTRY[name]
        laws = [f"{law} {law_state(cls.laws, law)}" for law in LAWS if law_state(cls.laws, law) != "does not hold"]
        laws += [f"with `{given}`: {', '.join(sorted(own))}" for given, own in cls.variants.items()]
        weights = "one set a layer" if cls.per_layer else "shared"
        cells = [f"`{parse(name).resolved}`", cls.summary, ", ".join(cls.sites()), weights, "; ".join(laws), cls.paper]
        rows.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    meaning = [f"- **{law}**: {text}" for law, text in LAWS.items()]
    return "\n".join([*rows, "", *meaning])


def main() -> int:
    try:
        print("\n\n".join(map(describe, sys.argv[1:])) or overview())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
