"""Positional encodings for timm's vision transformers: plug in by one string, train, measure spatial invariance."""

from vitpos import encodings as _encodings  # noqa: F401  (registers them)
from vitpos import names as _names  # noqa: F401  (and their names in timm's registry)
from vitpos.backbone import ColdSwapWarning, attach, create_model, fade_of, resize_policy, set_fade, set_resize
from vitpos.checkpoint import load, read_card, save
from vitpos.conversions import convert
from vitpos.encoding import Encoding, describe
from vitpos.spec import list_encodings, parse, register

__version__ = "0.1.0"
__all__ = [
    "ColdSwapWarning",
    "Encoding",
    "attach",
    "convert",
    "create_model",
    "describe",
    "fade_of",
    "list_encodings",
    "load",
    "parse",
    "read_card",
    "register",
    "resize_policy",
    "save",
    "set_fade",
    "set_resize",
]
