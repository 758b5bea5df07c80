"""Which logits of a model belong to the classes of a data set, by name: a data set may hold some of a model's classes.

ImageNet's classes are named by their WordNet ids (wnids, such as n01440764); their order in a model's logits is timm's.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset


def label_set(model: Any) -> tuple[list[str], str]:
    """The names of a timm model's classes, in the order of its logits, and where they come from: its own configuration,
    or timm's ImageNet label set of that many classes (1k, 12k, and the variants of 21k). ([], "") where there is none.
    """
    count = getattr(model, "num_classes", None)
    own = getattr(model, "pretrained_cfg", {}).get("label_names")
    if own and len(own) == count:
        return list(own), "the model's configuration"
    subset = infer_imagenet_subset(model)
    return (ImageNetInfo(subset).label_names(), subset) if subset else ([], "")


def places(classes: Sequence[str], known: Sequence[str], who: str) -> list[int]:
    """The logit of each of a data set's `classes` [K] in a model's order of names `known`.

    Raises ValueError for a class that the model, `who` in messages, does not have, with the nearest that it has.
    """
    index = {name: i for i, name in enumerate(known)}
    missing = [name for name in classes if name not in index]
    if missing:
        raise ValueError(
            f"{missing[0]!r} ({len(missing)} of {len(classes)} classes of the data) is no class of {who}, "
            f"whose {len(known)} are named like {known[0]!r}; {_nearest(missing[0], known)}"
        )
    return [index[name] for name in classes]


def _nearest(word: str, known: Sequence[str]) -> str:
    """Half a sentence with the nearest names; a word that describes a wnid leads to it too."""
    described: dict[str, list[str]] = {}
    if any(name[1:].isdigit() for name in known):
        info = ImageNetInfo("imagenet-22k")
        for wnid in known:
            with contextlib.suppress(KeyError):  # not one of WordNet's
                for lemma in info.label_name_to_description(wnid).split(", "):
                    described.setdefault(lemma.lower(), []).append(wnid)
    choices = {name: [name] for name in known} | described
    close = difflib.get_close_matches(word.lower(), choices, n=3, cutoff=0.6)
    if not close:
        return "name the folders so, or give data of the model's classes"
    found = [name if name == key else f"{name} ({key})" for key in close for name in choices[key]]
    return f"did you mean {' or '.join(found[:3])}?"
