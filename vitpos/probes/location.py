"""Location: what the tokens of each layer know of their own place, and how much of them it makes up.

Two measurements of every layer's patch tokens z[i, n] (image i, place n; for a convolutional network its feature maps):

- Decoding: ridge regression from z to (row, column), min |y - X w - b|^2 + alpha |w|^2 over standardised features,
  trained on some images and scored on others (folds of whole images). R^2 = 1 - sum of squared errors / sum of squares
  about the mean place, over all held-out images; cell accuracy: both coordinates right after rounding. Decoding says
  what *can* be read off, not that it is used, and content has places too (sky is above): three nulls stand beside it,
  `random` (the same architecture and encoding, new weights), `no_encoding` (these weights, the encoding taken away; not
  a network trained without) and `pixels` (the raw pixels of each patch). Selectivity = R^2 - the largest of the nulls.
- Share of position (eta squared): between / total; total = mean |z[i, n] - m|^2 about the mean m over everything,
  and between = the part explained by the place, Var_n(E_i z[i, n]). E_i is taken over the other images
  (between_i = mean_n <z[i, n] - m, mean of the others' z[., n] - m>), so that few images do not inflate it: where
  place explains nothing the expectation is 0, up to 1/images. Its fall with depth is the dilution of the position.

Sums over tokens are accumulated in float64 and the images are run twice, so memory holds folds x layers matrices of
width squared, whatever the number of images.

Source: Islam et al. 2020, How Much Position Information Do CNNs Encode?, arXiv:2001.08248 (decoding from frozen
features; the linear read-out and the nulls here are ours); Fisher 1925 (eta squared).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import vitpos
from vitpos import names, seeds, stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._views import View, curves, table

NETS = ("trained", "random", "no_encoding", "pixels")
NULLS = NETS[1:]
MOST_PIXELS = 16  # a patch is shrunk to this side for the null of its pixels
Maps = Callable[[Tensor], dict[str, Tensor]]  # raw pixels [b, C, H, W] -> maps [b, D, h, w] by layer


class Ridge:
    """Ridge regression of places from tokens by folds of images, from sums alone."""

    def __init__(self, folds: int, width: int, grid: tuple[int, int], device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(folds, *shape, dtype=torch.float64, device=device)

        h, w = grid
        places = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)
        self.places = places.reshape(-1, 2).to(device, torch.float64)  # [N, 2]
        self.grid, self.count = grid, zeros()
        self.sums, self.squares, self.products = zeros(width), zeros(width, width), zeros(width, 2)

    def add(self, tokens: Tensor, folds: Tensor) -> None:
        """tokens [b, N, D] of images that belong to `folds` [b]."""
        for fold in folds.unique().tolist():
            mine = tokens[folds == fold]
            flat = mine.flatten(0, 1)
            self.count[fold] += len(flat)
            self.sums[fold] += flat.sum(0)
            self.squares[fold] += flat.mT @ flat
            self.products[fold] += mine.sum(0).mT @ self.places

    def solve(self, alpha: float) -> None:
        """For each fold the weights [D, 2] and intercept [2] fitted on all others."""
        count, sums, squares, products = (
            total.sum(0) - total for total in (self.count, self.sums, self.squares, self.products)
        )
        mean, place = sums / count[:, None], self.places.mean(0)
        covariance = squares / count[:, None, None] - mean[:, :, None] * mean[:, None, :]
        spread = covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        varies = spread > 1e-9 * spread.amax(1, keepdim=True).clamp(min=1e-300)
        spread = spread.where(varies, torch.inf)  # what is constant drops out
        matrix = covariance / (spread[:, :, None] * spread[:, None, :])
        matrix.diagonal(dim1=1, dim2=2).add_(alpha / count[:, None])
        target = (products / count[:, None, None] - mean[:, :, None] * place) / spread[:, :, None]
        self.weights = torch.linalg.solve(matrix, target) / spread[:, :, None]  # [folds, D, 2]
        self.intercept = place - (mean[:, :, None] * self.weights).sum(1)

    def score(self, tokens: Tensor, folds: Tensor) -> tuple[Tensor, Tensor]:
        """Squared error summed over places [b, 2], and the share of places hit [b], each by the weights that have not
        seen the image."""
        found = tokens @ self.weights[folds] + self.intercept[folds][:, None]
        hit = (found.round() == self.places).all(-1)
        return (found - self.places).square().sum(1), hit.double().mean(1)


def patches(pixels: Tensor, patch: tuple[int, int]) -> dict[str, Tensor]:
    """The raw pixels of each patch as a map [b, C p p, h, w], shrunk to `MOST_PIXELS` a side."""
    h, w = pixels.shape[-2] // patch[0], pixels.shape[-1] // patch[1]
    side = tuple(min(p, MOST_PIXELS) for p in patch)
    small = F.adaptive_avg_pool2d(pixels[..., : h * patch[0], : w * patch[1]], (h * side[0], w * side[1]))
    return {"pixels": F.unfold(small, side, stride=side).unflatten(2, (h, w))}


@register(
    "location",
    definitions={
        "row, column": "R^2 of linear (ridge) decoding of a token's row or column, on images the decoder has not seen.",
        "random": "Null: the same decoding from a network of the same architecture and encoding with new weights.",
        "no_encoding": "Null: from these weights with the encoding taken away (not a network trained without one).",
        "pixels": "Null: from the raw pixels of each patch: what content alone tells of its place.",
        "selectivity": "Mean of the two R^2 minus the largest such mean among the nulls of that layer.",
        "cells": "Share of tokens whose row and column are both right after rounding.",
        "position_share": "Share of the variance of the tokens that their place explains (eta squared); its fall with "
        "depth is the dilution of the position.",
    },
)
class Location:
    """Options: `images` that are decoded from (0: all), `folds` of the cross-validation, `alpha`: ridge penalty."""

    defaults: ClassVar[dict[str, Any]] = {"images": 96, "folds": 4, "alpha": 1.0}

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        part, chosen = subject.some(options["images"])
        if options["folds"] < 2 or options["alpha"] <= 0:
            raise ValueError(f"location.folds must be 2 or more and alpha positive, got {dict(options)}")
        if len(chosen) < 2 * options["folds"]:
            raise NotApplicable(f"{options['folds']} folds need {2 * options['folds']} images, there are {len(chosen)}")
        arrays: Arrays = {"images": chosen}
        for net in NETS:
            try:
                maps = self._maps(part, net)
                found = self._measure(part, maps, options, net)
            except NotApplicable as reason:
                if net == "trained":
                    raise
                found = {"not_applicable": np.array(str(reason))}
            arrays |= {f"{net}/{key}": array for key, array in found.items()}
        return arrays

    @staticmethod
    def _maps(subject: Subject, net: str) -> Maps:
        if net == "pixels":
            if subject.size[0] < subject.patch[0] or subject.size[1] < subject.patch[1]:
                raise NotApplicable(f"an image of {subject.size[0]}x{subject.size[1]} px has no whole patch")
            return lambda pixels: patches(pixels, subject.patch)
        model: nn.Module = subject.model
        if net == "random":
            torch.manual_seed(seeds.stream(0, "probe-backbone"))
            try:
                with torch.inference_mode(False):
                    model = names.renew(model, encoding_seed=seeds.stream(0, "probe-encoding"))
                    model.to(subject.device).eval()
            except ValueError as error:
                raise NotApplicable(f"no fresh network can be made: {error}") from None
        elif net == "no_encoding":
            model = subject.positioned()
            if str(model.position.spec) == "none":  # type: ignore[union-attr]
                raise NotApplicable("the model has no encoding to take away")
            with torch.inference_mode(False), warnings.catch_warnings():
                warnings.simplefilter("ignore", vitpos.backbone.ColdSwapWarning)  # the point of it
                model = vitpos.attach(copy.deepcopy(model), "none")
        return lambda pixels: subject.features(pixels, model)

    @staticmethod
    def _measure(subject: Subject, maps: Maps, options: Mapping[str, Any], net: str) -> Arrays:
        n = len(subject.indices)
        folds = torch.arange(n) % options["folds"]
        advance = subject.track(f"location, {net}", 2 * n)

        def tokens() -> Iterator[tuple[slice, dict[str, Tensor], dict[str, tuple[int, int]]]]:
            for where, pixels in subject.loaded():
                found = maps(pixels)
                yield (
                    where,
                    {name: one.flatten(2).mT.double() for name, one in found.items()},
                    {name: (one.shape[2], one.shape[3]) for name, one in found.items()},
                )
                advance(len(pixels))

        ridges: dict[str, Ridge] = {}
        means: dict[str, Tensor] = {}
        for where, layers, grids in tokens():
            for name, z in layers.items():
                if name not in ridges:
                    ridges[name] = Ridge(options["folds"], z.shape[-1], grids[name], z.device)
                    means[name] = torch.zeros_like(z[0])
                ridges[name].add(z, folds[where].to(z.device))
                means[name] += z.sum(0) / n
        for ridge in ridges.values():
            ridge.solve(options["alpha"])
        columns = {key: np.zeros((len(ridges), n)) for key in ("row", "column", "cells", "between", "total")}
        for where, layers, _ in tokens():
            for k, (name, z) in enumerate(layers.items()):
                error, hit = ridges[name].score(z, folds[where].to(z.device))
                middle = means[name].mean(0)
                others = (n * means[name] - z) / (n - 1) - middle
                found = {
                    "row": error[:, 0], "column": error[:, 1], "cells": hit,
                    "between": ((z - middle) * others).sum(-1).mean(-1),
                    "total": (z - middle).square().sum(-1).mean(-1),
                }  # fmt: skip
                for key, values in found.items():
                    columns[key][k, where] = values.cpu().numpy()
        return {"layers": np.array(list(ridges)), "grids": np.array([r.grid for r in ridges.values()])} | columns

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        nets: dict[str, Any] = {}
        for net in NETS:
            own = _of(arrays, net)
            if "not_applicable" in own:
                nets[net] = {"not_applicable": str(own["not_applicable"])}
                continue
            nets[net] = {"layers": [_layer(own, k) for k in range(len(own["layers"]))]}
        trained = nets["trained"]["layers"]
        for k, layer in enumerate(trained):
            nulls = [_mean_r2(_beside(nets[net], k)) for net in NULLS if "layers" in nets[net]]
            known = [value for value in nulls if value is not None]
            own_r2 = _mean_r2(layer)
            layer["selectivity"] = own_r2 - max(known) if known and own_r2 is not None else None
        return {"images_used": len(arrays["images"]), "nets": nets}

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score | None]:
        """Of the network as trained. No selectivity: which null is the largest may hang on a rounding, and what is not
        smooth has no linearised score."""
        own = _of(arrays, "trained")
        found: dict[str, stats.Score | None] = {}
        for k, layer in enumerate(own["layers"]):
            found |= {f"{key}/{layer}": ratio.score() for key, ratio in _ratios(own, k).items()}
            found[f"cells/{layer}"] = stats.Score(own["cells"][k], int(own["grids"][k].prod()))
        return found

    def views(self, summary: dict[str, Any]) -> list[View]:
        trained = summary["nets"]["trained"]["layers"]
        layers = [layer["layer"] for layer in trained]
        lines: dict[str, Any] = {
            "row": (layers, [layer["row"] for layer in trained]),
            "column": (layers, [layer["column"] for layer in trained]),
        }
        for net in NULLS:
            if "layers" in summary["nets"][net]:
                beside = [_beside(summary["nets"][net], k) for k in range(len(layers))]
                lines[f"{net} (mean)"] = (layers, [_mean_r2(layer) for layer in beside])
        shares = {"position": (layers, [layer["position_share"] for layer in trained])}
        for net in ("random", "pixels"):
            if "layers" in summary["nets"][net]:
                beside = [_beside(summary["nets"][net], k) for k in range(len(layers))]
                shares[net] = (layers, [layer["position_share"] for layer in beside])
        rows = [[layer["layer"], layer["row"], layer["column"], layer["selectivity"], layer["cells"],
                 layer["position_share"]] for layer in trained]  # fmt: skip
        note = (
            "R² of a linear decoder of each token's place, on images it has not seen, and beside it the same from a "
            "network of random weights, from these weights without their encoding, and from the pixels of the patch. "
            "Above the nulls it is knowledge of the place that training and encoding put there."
        )
        return [
            curves("decoding", "Where a token is, read off it", note, "layer", "R²", lines, ""),
            curves(
                "share", "Share of the tokens' variance that their place explains",
                "Eta squared, by layer: its fall with depth is the dilution of the position.", "layer", "share (%)",
                shares, "percent",
            ),
            table(
                "layers", "Location by layer", "Selectivity: mean R² above the largest null. " + note,
                {"layer": "", "row R²": "", "column R²": "", "selectivity": "", "cells right": "percent",
                 "position share": "percent"}, rows,
            ),
        ]  # fmt: skip


def _of(arrays: Arrays, net: str) -> Arrays:
    return {key.removeprefix(f"{net}/"): array for key, array in arrays.items() if key.startswith(f"{net}/")}


def _ratios(columns: Arrays, k: int) -> dict[str, stats.Ratio]:
    """What are ratios of sums over images of one layer of one network."""
    h, w = columns["grids"][k].tolist()
    found = {}
    for key, side, copies in (("row", h, w), ("column", w, h)):
        about_mean = copies * side * (side**2 - 1) / 12  # squares of 0..side-1 about their mean, each line
        error = columns[key][k]
        found[key] = stats.Ratio(about_mean - error, np.full_like(error, about_mean))
    return found | {"position_share": stats.Ratio(columns["between"][k], columns["total"][k], "percent")}


def _layer(columns: Arrays, k: int) -> dict[str, Any]:
    """Numbers of one layer of one network."""
    h, w = columns["grids"][k].tolist()
    cells = stats.mean_over_images(columns["cells"][k], h * w).as_dict()
    ratios = {key: ratio.summary() for key, ratio in _ratios(columns, k).items()}
    return {"layer": str(columns["layers"][k]), "grid": [h, w], "cells": cells, **ratios}


def _mean_r2(layer: Mapping[str, Any]) -> float | None:
    known = [layer[key]["value"] for key in ("row", "column") if layer[key]]
    return sum(known) / len(known) if known else None


def _beside(net: Mapping[str, Any], k: int) -> dict[str, Any]:
    """The layer of a null that stands beside layer k: pixels have one only."""
    return net["layers"][min(k, len(net["layers"]) - 1)]
