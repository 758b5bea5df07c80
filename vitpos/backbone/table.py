"""Which of timm's vision transformers are served, and why the others are not: a table made by trying each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import timm
import torch

from vitpos.backbone.attaching import attach
from vitpos.backbone.parts import attentions_of
from vitpos.backbone.resizing import position_of

ANOTHER = "rope_axial + rpb + sincos2d"
MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva", "beit", "vision_transformer_relpos")


@dataclass(frozen=True)
class Row:
    """One model by name: its classes, prefix tokens and own encoding, or why it is not served."""

    name: str
    model: str
    block: str
    attention: str
    patches: str
    prefix: int
    native: str
    refusal: str = ""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it has in common with others: all but its name."""
        return (self.model, self.block, self.attention, self.patches, self.prefix, self.native, self.refusal)


def names() -> list[str]:
    """The names that timm knows in the modules of its plain vision transformers."""
    return sorted(name for module in MODULES for name in timm.list_models(module=module))


def try_model(name: str, try_also: Callable[[Any], None] | None = None) -> Row:
    """Build a model of this name without weights, attach ``native``, then ``rope_axial + rpb + sincos2d``."""
    with torch.device("meta"):
        model: Any = timm.create_model(name)
        block = model.blocks[0]
        found = getattr(block, "attn", None) or next(iter(attentions_of(block)), block)
        described = dict(
            name=name,
            model=type(model).__name__,
            block=type(block).__name__,
            attention="in the block" if found is block else type(found).__name__,
            patches=type(model.patch_embed).__name__,
            prefix=model.num_prefix_tokens,
        )
        try:
            native = str(position_of(attach(model, "native")).spec)
            attach(model, ANOTHER, preserve=False)
        except TypeError as error:
            return Row(**described, native="", refusal=str(error).split(": ", 1)[1])
        if try_also is not None:
            try_also(model)
    return Row(**described, native=native)


def markdown(rows: list[Row]) -> str:
    """The page: how many of those tried are served, then model by model."""
    served = sum(not row.refusal for row in rows)
    return "\n".join(_lines(rows, served)) + "\n"


def _lines(rows: list[Row], served: int) -> Iterator[str]:
    yield "# Models"
    yield ""
    yield (
        f"Of the {len(rows)} names in timm {timm.__version__}'s modules {', '.join(f'`{m}`' for m in MODULES)}, "
        f"{served} take an encoding: each was built on the meta device and given `native`, then `{ANOTHER}`. "
        "Others raise `TypeError`, as do all models that are no plain vision transformers. `native` says what a model "
        "comes with: `ape1d` is timm's `pos_embed`, `native` what it holds in modules of its own (rotary tables, "
        "biases). Made by `make docs`."
    )
    yield ""
    yield "| model | class | block | attention | patches | prefix tokens | native |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        last = f"not served: {row.refusal}" if row.refusal else f"`{row.native}`"
        cells = (row.name, row.model, row.block, row.attention, row.patches, row.prefix, last)
        yield f"| {' | '.join(map(str, cells))} |"
