"""Spec strings: how an encoding is written, read and stored, and the one registry that names resolve in.

A spec is a name, optional keyword arguments that are Python literals, and ``+`` to combine::

    rope_axial                      rope_axial(theta=50.0)                 rope_mixed + ape1d

An encoding may come or go while a model trains: ``gated(rope_axial)`` starts with no effect and learns how much of
it to take, ``fading(ape1d)`` is an absolute encoding that a schedule takes away.

It is parsed, never evaluated. ``str(parse(text))`` is canonical (defaults left out, order kept), so that a
config, a log, a checkpoint and a table row can all hold the same string.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

REGISTRY: dict[str, Any] = {}  # name -> class
MODIFIERS = ("gated", "fading")
_Class = TypeVar("_Class", bound=type)


def register(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: make an encoding known by ``name``. A second class of the same name is a ValueError."""

    def add(cls: _Class) -> _Class:
        old = REGISTRY.get(name, cls)
        if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):  # a reload is the same class
            raise ValueError(f"encoding {name!r} is already registered by {old.__module__}.{old.__qualname__}")
        if not name.isidentifier() or name in MODIFIERS:
            raise ValueError(
                f"encoding name {name!r} must be a Python identifier, to be usable in a spec, and none of "
                f"{', '.join(MODIFIERS)}"
            )
        REGISTRY[name] = cls
        cls.name = name  # type: ignore[attr-defined]
        return cls

    return add


def list_encodings() -> list[str]:
    """The names of all registered encodings, sorted."""
    return sorted(REGISTRY)


def lookup(name: str) -> Any:
    """The class registered under ``name``; ValueError with the nearest names otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an encoding is a string, got {type(name).__name__} {shortened(repr(name))}")
    if name not in REGISTRY:
        raise ValueError(f"unknown encoding {shortened(name)!r}; {nearest(name, REGISTRY)}")
    return REGISTRY[name]


def shortened(text: str, limit: int = 100) -> str:
    """``text`` as it fits into an error message."""
    return text if len(text) <= limit else f"{text[: limit - 20]}... ({len(text)} characters)"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Half a sentence that names the choices nearest to ``word``, or all of them when none is near."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(choices) or '(none)'}"


@dataclass(frozen=True)
class Option:
    """One keyword option of an encoding: its name, type annotation and default."""

    name: str
    annotation: Any
    default: Any

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The alternatives of the annotation: types and Literals."""
        is_union = typing.get_origin(self.annotation) in (typing.Union, types.UnionType)
        return typing.get_args(self.annotation) if is_union else (self.annotation,)

    def check(self, value: Any, owner: str) -> Any:
        """``value`` if it has the option's type (an int where a float is wanted becomes one), else TypeError."""
        for kind in self.kinds:
            if typing.get_origin(kind) is typing.Literal:
                if any(value == choice and type(value) is type(choice) for choice in typing.get_args(kind)):
                    return value
            elif kind is float and type(value) in (int, float):
                if abs(value) > sys.float_info.max or value != value:
                    raise ValueError(f"{owner}: {self.name}={shortened(repr(value))} must be a finite number")
                return float(value)
            elif type(value) is kind:
                return value
        choices = [str(c) for kind in self.kinds for c in typing.get_args(kind)]
        if choices:
            hint = nearest(value, choices) if isinstance(value, str) else f"known: {', '.join(choices)}"
            raise ValueError(f"{owner}: {self.name}={shortened(repr(value))} is not a choice; {hint}")
        wanted = " or ".join("None" if k is type(None) else k.__name__ for k in self.kinds)
        raise TypeError(
            f"{owner}: {self.name}={shortened(repr(value))} is {type(value).__name__}, "
            f"expected {wanted} (default {self.default!r})"
        )


def options(name: str) -> dict[str, Option]:
    """The options of an encoding: the keyword-only parameters of its class, in order."""
    init = lookup(name).__init__
    hints = typing.get_type_hints(init)
    return {
        p.name: Option(p.name, hints[p.name], p.default)
        for p in inspect.signature(init).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


@dataclass(frozen=True)
class Term:
    """One encoding of a spec, with every option resolved (those given and those by default).

    ``modifier`` is one of ``MODIFIERS``, or "" for an encoding that is simply there.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    modifier: str = ""

    @classmethod
    def build(cls, name: str, given: Mapping[str, Any]) -> Term:
        """Check name, option names and option types; fill in the defaults."""
        known = options(name)
        for key in given:
            if key not in known:
                raise ValueError(f"{name} has no option {shortened(key)!r}; {nearest(key, known)}")
        checked = {key: option.check(given.get(key, option.default), name) for key, option in known.items()}
        return cls(name, tuple(_dependent_defaults(name, checked).items()))

    def _format(self, pairs: Iterable[tuple[str, Any]]) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in pairs)
        text = f"{self.name}({inside})" if inside else self.name
        return f"{self.modifier}({text})" if self.modifier else text

    def __str__(self) -> str:
        known = options(self.name)

        def is_default(key: str, value: Any) -> bool:
            without = _dependent_defaults(self.name, {**dict(self.options), key: known[key].default})
            return without[key] == value

        return self._format((k, v) for k, v in self.options if not is_default(k, v))

    @property
    def resolved(self) -> str:
        """The term with every option written out."""
        return self._format(self.options)


def _dependent_defaults(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Fill in the options whose default depends on other options (the class method ``resolve`` knows)."""
    resolve = getattr(lookup(name), "resolve", None)
    return resolve(values) if resolve else values


@dataclass(frozen=True)
class Spec:
    """A parsed spec: one or more terms. ``str`` is canonical; ``resolved`` writes every option out."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))

    @property
    def resolved(self) -> str:
        return " + ".join(term.resolved for term in self.terms)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)


def parse(text: str | Spec) -> Spec:
    """Read a spec string. Nothing in it is executed.

    Raises ValueError for a malformed spec, an unknown encoding or option (naming the nearest); TypeError for an
    option of the wrong type or a ``text`` that is no string.

    >>> str(parse("rope_axial( theta = 100 )+ape1d"))
    'rope_axial + ape1d'
    >>> parse("sincos2d(temperature=50)").resolved
    "sincos2d(temperature=50.0, layout='timm', resize='extrapolate')"
    """
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise TypeError(
            f"a spec is a string such as 'rope_axial(theta=50.0)', got {type(text).__name__} {shortened(repr(text))}"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _malformed(text) from None
    return Spec(tuple(_term(node, text) for node in _summands(tree)))


def _malformed(text: str) -> ValueError:
    return ValueError(f"cannot read spec {shortened(text)!r}; write name, name(option=value) or name + name")


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]


def _term(node: ast.expr, text: str) -> Term:
    if isinstance(node, ast.Name) and node.id not in MODIFIERS:
        return Term.build(node.id, {})
    if isinstance(node, ast.Name):
        raise ValueError(f"{node.id} holds one encoding, as in {node.id}(ape1d); got {shortened(text)!r}")
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise _malformed(text)
    name = node.func.id
    if name in MODIFIERS:
        if len(node.args) != 1 or node.keywords:
            raise ValueError(f"{name} holds one encoding, as in {name}(ape1d); got {shortened(text)!r}")
        term = _term(node.args[0], text)
        if term.modifier:
            raise ValueError(f"{term.name} is {term.modifier} and {name} at once in {shortened(text)!r}; use one")
        return replace(term, modifier=name)
    lookup(name)
    if node.args:
        raise ValueError(f"{name}: options are given by name, as in {name}({_example(name)}); got {shortened(text)!r}")
    given: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _malformed(text)
        if keyword.arg in given:
            raise ValueError(f"{name}: option {keyword.arg} is given twice in {shortened(text)!r}")
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(
                f"{name}: {keyword.arg}={shortened(ast.unparse(keyword.value))} is no Python literal; write a number, "
                "a quoted string, True, False or None"
            ) from None
    return Term.build(name, given)


def _example(name: str) -> str:
    known = list(options(name).values())
    return f"{known[0].name}={known[0].default!r}" if known else ""
