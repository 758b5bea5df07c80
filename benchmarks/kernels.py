"""What encodings cost on a CPU in eager mode, next to timm's and to no encoding at all.

python benchmarks/kernels.py [--rounds 30] [--threads 1] [--only WORD ...]     (about 20 minutes on an idle machine)

How rivals take turns: benchmarks/rivals.py. A turn of an operator is many calls in a row, so that each finds its own
data in the cache where they fit; "qkv and ..." has it where it is in a model, on what the projection has just written.
Other encodings have ten rounds. The floor is timm's own model without an encoding. A training step is forward and
backward, without the optimizer. With several threads times are wall times; peak memory is that of one thread.
"""

import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.nn.functional as F
from rivals import HEADER, Rivals, parser, race
from timm.layers import RelPosBias, RotaryEmbeddingCat, RotaryEmbeddingMixed, apply_rot_embed_cat
from torch import Tensor

import vitpos
from vitpos import kernels, positions
from vitpos.attention import expand_angles, expand_bias
from vitpos.encoding import Geometry
from vitpos.spec import lookup

TURN = 0.02  # seconds that a rival has at least
GRIDS = {64: 8, 196: 14, 576: 24, 1024: 32}
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SMALL: dict[str, Any] = {"embed_dim": 384, "num_heads": 6, "depth": 4, "num_classes": 0}
TINY: dict[str, Any] = {"embed_dim": 192, "num_heads": 3, "depth": 4, "num_classes": 0}
CIFAR: dict[str, Any] = {"embed_dim": 192, "num_heads": 3, "depth": 4, "num_classes": 0, "patch_size": 4}


class Table:
    """The rows that are wanted."""

    def __init__(self, rounds: int, only: list[str]):
        self.rounds, self.only = rounds, only
        self.titles: dict[str, None] = {}  # in their order

    def wants(self, title: str) -> bool:
        self.titles[title] = None
        return not self.only or any(word in title for word in self.only)

    def race(self, title: str, rivals: Rivals) -> None:
        if self.wants(title):
            race(title, rivals, self.rounds, least=TURN, clocks=("CPU" if torch.get_num_threads() == 1 else "wall",))


def both_ways(run: Callable[[], Any], learned: list[Tensor]) -> Callable[[], object]:
    """Forward, and backward from gradients that stay the same."""
    weights: list[Tensor] = []

    def step() -> object:
        out = run()
        out = out if isinstance(out, tuple) else (out,)
        weights.extend(torch.randn_like(t) for t in out[len(weights) :])
        return torch.autograd.grad(out, learned, weights)

    return step


def without_gradients(rivals: Rivals) -> Rivals:
    return {name: torch.no_grad()(run) for name, run in rivals.items()}


def timms_split(qkv: Tensor, embed: Tensor | None = None) -> tuple[Tensor, ...]:
    """As its rotary attention does, with one prefix token; without ``embed`` as its plain one."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if embed is not None:
        q, k = (torch.cat([t[:, :, :1], apply_rot_embed_cat(t[:, :, 1:], embed)], dim=2) for t in (q, k))
    return q, k, v


def rotary(table: Table, count: int, kind: str) -> None:
    side, heads, width, batch = GRIDS[count], 6, 64, 8
    embed = RotaryEmbeddingCat(width, in_pixels=False, feat_shape=[side, side]).get_embed()
    sin, cos = embed.chunk(2, dim=-1)
    turn = torch.stack([cos[:, ::2], sin[:, ::2]], dim=-1)[None, None]
    embed = embed.to(TYPES[kind])
    shape = (batch, count + 1, 3, heads, width)
    qkv = torch.randn(shape, dtype=TYPES[kind], requires_grad=True)
    own = qkv.detach().clone().requires_grad_()  # the kernel rotates it where it lies

    where = f"{kind}, N={count}"
    rivals: Rivals = {"timm": lambda: timms_split(qkv, embed), "vitpos": lambda: kernels.split(own, turn, prefix=1)}
    table.race(f"rotary apply, {where}", without_gradients(rivals))

    x, weight = (torch.randn(*size, heads * width, dtype=TYPES[kind]) for size in (shape[:2], (3 * heads * width,)))

    def project() -> Tensor:
        return F.linear(x, weight).view(shape)

    in_place: Rivals = {
        "projection": project,
        "timm": lambda: timms_split(project(), embed),
        "vitpos": lambda: kernels.split(project(), turn, prefix=1),
    }
    table.race(f"qkv and rotary apply, {where}", without_gradients(in_place))

    learned = {"timm": [qkv], "vitpos": [own]}
    rivals = {name: both_ways(run, learned[name]) for name, run in rivals.items()}
    rivals["timm's split alone"] = both_ways(lambda: timms_split(qkv), [qkv])
    rivals["vitpos's split alone"] = both_ways(lambda: kernels.split(own), [own])
    table.race(f"split + rotate, both ways, {where}", rivals)


def geometry(side: int) -> Geometry:
    return Geometry(dim=384, heads=6, head_dim=64, depth=12, grid=(side, side))


def mixed_tables(table: Table, count: int) -> None:
    side = GRIDS[count]
    theirs = RotaryEmbeddingMixed(dim=384, depth=12, num_heads=6, feat_shape=[side, side])
    layers = [lookup("rope_mixed")(geometry(side)) for _ in range(12)]
    pos = positions.grid(side, side)

    def run() -> tuple[Tensor, ...]:
        return tuple(expand_angles(layer.angles(pos), 0).turn for layer in layers)

    def one_by_one() -> None:  # a model makes phases of all layers at once, timm the whole tables
        for layer in layers:
            expand_angles(layer.angles(pos), 0)

    rivals: Rivals = {"timm": theirs.get_embed, "vitpos": one_by_one}
    table.race(f"rope_mixed tables of 12 layers, N={count}", without_gradients(rivals))
    learned = [layer.weight for layer in layers]
    rivals = {"timm": both_ways(theirs.get_embed, [theirs.freqs]), "vitpos": both_ways(run, learned)}
    table.race(f"rope_mixed tables of 12 layers, both ways, N={count}", rivals)


def bias(table: Table, count: int) -> None:
    side = GRIDS[count]
    theirs = RelPosBias((side, side), 6)
    ours = lookup("rpb")(geometry(side))
    pos = positions.grid(side, side)
    rivals: Rivals = {"timm": theirs.get_bias, "vitpos": lambda: expand_bias(ours.bias(pos), 0)}
    table.race(f"bias, N={count}", without_gradients(rivals))
    learned = {"timm": [theirs.relative_position_bias_table], "vitpos": [ours.table]}
    table.race(f"bias, both ways, N={count}", {n: both_ways(run, learned[n]) for n, run in rivals.items()})


def attention(table: Table, count: int, kind: str) -> None:
    heads, width, batch = 6, 64, {64: 32, 196: 8, 576: 2, 1024: 1}[count]
    tokens, dtype = count + 1, TYPES[kind]
    given = [torch.randn(batch, tokens, heads, width, dtype=dtype, requires_grad=True) for _ in range(3)]
    q, k, v = (t.transpose(1, 2) for t in given)
    learned = torch.randn(1, heads, tokens, tokens, dtype=dtype, requires_grad=True)

    def fused(bias: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def ours(bias: Tensor | None) -> Tensor:
        return kernels.attend(q, k, v, bias, width**-0.5)

    where = f"{kind}, N={count}, B={batch}"
    rivals = {
        "fused, no bias": both_ways(lambda: fused(None), given),
        "fused, bias": both_ways(lambda: fused(learned), [*given, learned]),
        "vitpos, bias": both_ways(lambda: ours(learned), [*given, learned]),
        "vitpos, no bias": both_ways(lambda: ours(None), given),
    }
    table.race(f"attention, both ways, {where}", rivals)
    fixed = learned.detach()  # the fused kernel looks at this even without gradients
    rivals = {
        "fused, no bias": lambda: fused(None), "fused, bias": lambda: fused(fixed),
        "vitpos, bias": lambda: ours(fixed), "vitpos, no bias": lambda: ours(None),
    }  # fmt: skip
    table.race(f"attention, {where}", without_gradients(rivals))


THEIRS = {  # timm's models with an encoding inside
    "timm rope": ("vit_small_patch16_rope_224", {}),
    "timm rope_mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "timm rpb": ("vit_relpos_base_patch16_cls_224", {"rel_pos_type": "bias"}),
}


def models(side: int, sizes: dict[str, Any], specs: list[str]) -> dict[str, Any]:
    """By what is written in the table; the floor first."""
    image = side * sizes.get("patch_size", 16)
    sizes = {**sizes, "img_size": image}
    plain = "vit_small_patch16_224"
    found = {"timm none": timm.create_model(plain, pos_embed="none", **sizes)}
    for spec in specs:
        if spec in THEIRS:
            name, more = THEIRS[spec]
            found[spec] = timm.create_model(name, **sizes, **more)
            for block in found[spec].blocks:  # the scale of layers, which the others do not have
                block.gamma_1 = block.gamma_2 = None
                block.ls1 = block.ls2 = torch.nn.Identity()
        else:
            found[spec] = vitpos.create_model(plain, spec, **sizes)
    return found


def whole(table: Table, title: str, side: int, batch: int, sizes: dict[str, Any], kind: str, specs: list[str]) -> None:
    """Whole models of four blocks: patch embedding and final norm are among what is timed."""
    inferring, training = (f"{what}, {title}, {kind}" for what in ("inference", "training step"))
    if not (table.wants(inferring) or table.wants(training)):
        return
    found = models(side, sizes, specs)
    step = sizes.get("patch_size", 16)
    x = torch.randn(batch, 3, side * step, side * step)

    def forward(model: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bf16"):
            return model.forward_features(x)

    def train(model: Any) -> None:
        model.zero_grad(set_to_none=True)
        forward(model).float().square().mean().backward()

    def inference(model: Any) -> None:
        with torch.inference_mode():
            forward(model)

    for model in found.values():
        model.eval()
    table.race(inferring, {n: lambda m=m: inference(m) for n, m in found.items()})
    for model in found.values():
        model.train()
    table.race(training, {n: lambda m=m: train(m) for n, m in found.items()})


def as_graphs(table: Table) -> None:
    """Inference of what torch.compile and torch.export make of models, next to the eager floor."""
    x = torch.randn(2, 3, 224, 224)
    makers: dict[str, Callable[[Any], Any]] = {
        "compiled": torch.compile,
        "exported": lambda model: torch.export.export(model, (x,)).module(),
    }
    for kind, make in makers.items():
        title = f"{kind}, S, N=197, B=2, float32"
        if not table.wants(title):
            continue
        found = models(14, SMALL, ["none", "rope_axial", "rope_mixed", "rpb", *THEIRS])
        rivals: Rivals = {"timm none, eager": found["timm none"].eval()}
        rivals |= {name: make(model.eval()) for name, model in found.items()}
        table.race(title, without_gradients({name: lambda run=run: run(x) for name, run in rivals.items()}))


PEAK = """
import re, sys, timm, torch, vitpos
sys.path.insert(0, {here!r})
from kernels import TINY, models
torch.set_num_threads(1)
model = models(32, {{**TINY, "depth": 12}}, {specs!r})[{spec!r}].train()
x = torch.randn(1, 3, 512, 512)
for _ in range(3):
    model.zero_grad()
    model.forward_features(x).square().mean().backward()
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


def memory(table: Table, repeats: int = 3) -> None:
    title = "peak memory of training in MiB, Ti of 12 blocks, N=1025, B=1"
    if not table.wants(title):
        return
    cells = []
    for spec in ("timm none", "timm rpb", "rpb", "lookhere"):
        code = PEAK.format(here=sys.path[0], spec=spec, specs=[] if spec == "timm none" else [spec])
        peaks = [
            float(
                subprocess.run(
                    [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
                ).stdout
            )
            for _ in range(repeats)
        ]
        cells.append(f"{spec} {statistics.median(peaks):.0f} ({min(peaks):.0f}-{max(peaks):.0f})")
    print(f"| {title} | {repeats} processes each | {'; '.join(cells)} |")


def main() -> None:
    words = parser(__doc__, rounds=30)
    words.add_argument("--only", nargs="*", default=[], help="rows whose title holds one of these")
    args = words.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    table = Table(args.rounds, args.only)
    print(f"torch {torch.__version__}, timm {timm.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{args.rounds} rounds, {args.threads} thread(s)")
    print(HEADER)
    for kind in TYPES:
        for count in GRIDS:
            rotary(table, count, kind)
    for count in GRIDS:
        mixed_tables(table, count)
        bias(table, count)
    for kind in TYPES:
        for count in GRIDS:
            attention(table, count, kind)
    main_ones = ["none", "rope_axial", "rope_mixed", "rpb", *THEIRS]
    whole(table, "S, N=197, B=2", 14, 2, SMALL, "float32", main_ones)
    whole(table, "S, N=577, B=1", 24, 1, SMALL, "float32", main_ones)
    whole(table, "Ti, N=1025, B=1", 32, 1, TINY, "float32", main_ones)
    whole(table, "CIFAR, N=65, B=32", 8, 32, CIFAR, "float32", main_ones)
    whole(table, "CIFAR, N=65, B=32", 8, 32, CIFAR, "bf16", main_ones)
    whole(table, "S, N=197, B=2", 14, 2, SMALL, "bf16", main_ones)
    table.rounds = min(table.rounds, 10)
    rest = [name for name in vitpos.list_encodings() if name not in (*main_ones, "native")]
    whole(table, "S, every other encoding, N=197, B=2", 14, 2, SMALL, "float32", ["none", *rest])
    as_graphs(table)
    memory(table)
    unknown = [word for word in table.only if not any(word in title for title in table.titles)]
    if unknown:
        sys.exit(f"no row's title holds {unknown}; the titles are:\n" + "\n".join(table.titles))


if __name__ == "__main__":
    main()
