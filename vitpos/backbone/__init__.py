"""timm's vision transformers with a position encoding that can be exchanged: the only package that reaches into timm.

An existing model becomes vitpos's by changing the class of the model, of its patch embedding and of its
attentions, in place, to real subclasses defined here. Parameters, options and names stay timm's.

``parts``: patch embeddings and attentions; ``native``: encodings that timm's own modules hold; ``models``: the one
block loop and what the model classes differ in; ``attaching``: from a timm model to one with an encoding;
``preserving``: how it begins there without changing what the model computes; ``resizing``: the policies of a
model's encodings.
"""

from vitpos.backbone.attaching import ColdSwapWarning, attach, create_model
from vitpos.backbone.models import (
    Beit,
    Eva,
    PositionMixin,
    VisionTransformer,
    VisionTransformerDistilled,
    VisionTransformerRelPos,
)
from vitpos.backbone.preserving import fade_of, set_fade
from vitpos.backbone.resizing import position_of, resize_policy, set_resize, uncompiled, unwrapped

__all__ = [
    "Beit",
    "ColdSwapWarning",
    "Eva",
    "PositionMixin",
    "VisionTransformer",
    "VisionTransformerDistilled",
    "VisionTransformerRelPos",
    "attach",
    "create_model",
    "fade_of",
    "position_of",
    "resize_policy",
    "set_fade",
    "set_resize",
    "uncompiled",
    "unwrapped",
]
