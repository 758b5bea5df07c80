"""The controls: no position at all, and whatever the model came with."""

from collections.abc import Mapping
from typing import Any, Literal

from vitpos.encoding import LAWS, Encoding, Geometry
from vitpos.spec import register


@register("none")
class NoEncoding(Encoding):
    """No position: the image is a bag of patches. Class and register tokens stay.

    >>> NoEncoding.sites()
    ()
    """

    summary = "no position at all: a bag of patches"
    paper = "control"
    laws = frozenset(LAWS)

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        return "nothing"


@register("native")
class Native(Encoding):
    """Keeps what the timm model has: attaching it stands for the encoding found there (``ape1d`` on a ViT).

    >>> Native.sites()
    ()
    """

    summary = "what the timm model came with, kept as it is"
    paper = "control"

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        return "nothing"
