"""python -m vitpos.backbone: the table of timm's models that take an encoding, in Markdown."""

from vitpos.backbone.table import markdown, names, try_model

if __name__ == "__main__":
    print(markdown([try_model(name) for name in names()]), end="")
