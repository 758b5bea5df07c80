"""Imports point one way, and the package itself needs torch, timm and safetensors only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vitpos

ROOT = Path(vitpos.__file__).parent
ORDER = [
    "spec",
    "positions",
    "encoding",
    "encodings",
    "easing",
    "kernels",
    "attention",
    "composition",
    "pages",
    "hub",
    "backbone",
    "conversions",
    "names",
    "checkpoint",
    "seeds",
    "preemption",
    "augment",
    "data",
    "config",
    "states",
    "board",
    "runs",
    "training",
    "parts",
    "probes",
    "labels",
    "sources",
    "stored",
    "evaluation",
    "cli",
    "tuning",
]
WITHIN = {  # likewise, inside a package
    "backbone": ["parts", "native", "models", "resizing", "preserving", "loading", "attaching", "table"],
    "kernels": ["when", "rotating", "dense", "memory", "attending"],
    "data": ["dataset", "batches", "splits", "files", "workers", "decoded", "digits", "cifar", "folder", "webdataset"],
    "report": ["files", "grouping", "views", "words", "compare_tables", "text", "console", "figures", "page"],
}
APART = {  # numbers only: no model code
    "stats": set(),
    "hierarchy": {"stats"},
    "significance": {"stats", "hierarchy"},
    "coverage": {"stats", "hierarchy", "significance"},
    "tables": set(),
    "report": {"tables"},
    "compare": {"spec", "stats", "hierarchy", "significance", "report"},
}


def imported(path):
    """Modules of vitpos that a file imports, by their first name below the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "vitpos":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitpos."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("vitpos."))
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"


def violations(module, names):
    if module in APART:
        return [n for n in names if n not in APART[module] | {module}]
    allowed = set(ORDER[: ORDER.index(module) + 1]) | {"stats", "significance", "tables", "report", "compare"}
    return [n for n in names if n in {*ORDER, *APART} and n not in allowed]


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name != "__init__" and path.name != "__main__.py":  # entry points may import anything
            yield name, path


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda v: getattr(v, "stem", v))
def test_imports_point_one_way(name, path):
    assert name in ORDER or name in APART, f"{name} has no place in the order of imports"
    assert violations(name, list(imported(path))) == []


def test_the_check_sees_a_wrong_import():
    assert violations("encoding", ["backbone"]) == ["backbone"]
    assert violations("report", ["attention"]) == ["attention"]
    assert violations("attention", ["encoding"]) == []


@pytest.mark.parametrize("package", WITHIN)
def test_imports_inside_a_package_point_one_way(package):
    order = WITHIN[package]
    files = [path for path in (ROOT / package).glob("*.py") if not path.name.startswith("__")]
    assert {path.stem for path in files} == set(order)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"vitpos.{package}"):
                imported_file = node.module.split(".")[-1]  # never the package itself, whose __init__ imports all
                assert imported_file in order[: order.index(path.stem)], path


def test_swapped_classes_are_importable():
    """Classes that are swapped in are importable from where they say they are, or a pickle could not find them."""
    from vitpos.backbone import models, parts

    for swapped in (*parts.PARTS.values(), *models.MODELS.values()):
        found = getattr(sys.modules[swapped.__module__], swapped.__name__)
        assert found is swapped


@pytest.mark.parametrize("module", [m for m in ORDER if m not in ("backbone", "names", "checkpoint")])
def test_only_the_backbone_reaches_into_timms_models(module):
    found = []
    for name, path in modules():
        if name != module:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            found += [n for n in names if n.startswith(("timm.models", "timm.layers"))]
    assert found == []


def test_the_package_needs_no_trainer():
    """Import, build, save and load with everything but the three dependencies made unimportable."""
    blocked = ["hydra", "omegaconf", "accelerate", "kornia", "tensorboard", "scipy", "statsmodels", "pandas", "sklearn"]
    blocked += ["matplotlib", "jinja2", "rich"]
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import torch, vitpos
model = vitpos.create_model("vit_tiny_patch16_224", pos="rope_axial + rpb", img_size=32, depth=1)
assert model(torch.zeros(1, 3, 32, 48)).shape == (1, 1000)
try:
    import rich
except ImportError:
    print("blocked as meant")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "blocked as meant\n"
