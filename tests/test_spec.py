import typing

import pytest

import vitpos
from vitpos.spec import REGISTRY, Option, options, parse, register


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("rope_axial", "rope_axial"),
        (" rope_axial( theta = 1e2 ) ", "rope_axial"),
        ("rope_axial(theta=50)", "rope_axial(theta=50.0)"),
        ("rope_axial(resize='interpolate',theta=50)", "rope_axial(theta=50.0, resize='interpolate')"),
        ("rope_mixed+ape1d", "rope_mixed + ape1d"),
        ("ape1d + rope_mixed", "ape1d + rope_mixed"),
        ("(rpb + alibi2d) + ape2d(std=0)", "rpb + alibi2d + ape2d(std=0.0)"),
    ],
)
def test_canonical_form(text, canonical):
    assert str(parse(text)) == canonical
    assert str(parse(canonical)) == canonical
    assert str(parse(parse(text).resolved)) == canonical


def test_resolved_form_writes_out_every_option():
    assert parse("sincos2d").resolved == ("sincos2d(temperature=10000.0, layout='timm', resize='extrapolate')")


@pytest.mark.parametrize("name", vitpos.list_encodings())
def test_every_option_has_a_type_and_a_default(name):
    for option in options(name).values():
        assert option.check(option.default, name) == option.default
    assert str(parse(parse(name).resolved)) == name


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("rope_axail", ValueError, ["'rope_axail'", "did you mean rope_axial"]),
        ("zzz", ValueError, ["known:", "ape1d"]),
        ("rope_axial(tehta=3)", ValueError, ["no option 'tehta'", "did you mean theta"]),
        ("rope_axial(theta='x')", TypeError, ["theta='x'", "str", "expected float"]),
        ("rope_axial(theta=True)", TypeError, ["theta=True", "bool"]),
        ("rope_axial(theta=None)", TypeError, ["theta=None"]),
        ("rope_axial(resize='interpolat')", ValueError, ["did you mean interpolate"]),
        ("rope_axial(resize=3)", ValueError, ["resize=3", "extrapolate"]),
        ("rope_axial(50)", ValueError, ["by name", "theta=100.0"]),
        ("rope_axial(theta=x)", ValueError, ["no Python literal"]),
        ("rope_axial(theta=__import__('os').getpid())", ValueError, ["no Python literal"]),
        ("rope_axial(**{'theta': 3})", ValueError, ["cannot read spec"]),
        ("rope_axial(theta=1, theta=2)", ValueError, ["theta is given twice"]),
        ("rope_axial - ape1d", ValueError, ["cannot read spec"]),
        ("rope_axial +", ValueError, ["cannot read spec"]),
        ("", ValueError, ["cannot read spec"]),
        ("a.b(c=1)", ValueError, ["cannot read spec"]),
        (3, TypeError, ["a spec is a string", "int 3"]),
        (f"rope_axial(theta={'9' * 400})", ValueError, ["must be a finite number", "characters"]),
        ("rope_axial(theta=1e999)", ValueError, ["theta=inf must be a finite number"]),
        ("x" * 100_000, ValueError, ["unknown encoding", "(100000 characters)"]),
        (None, TypeError, ["a spec is a string"]),
    ],
)
def test_bad_specs_say_what_is_wrong(text, error, words):
    with pytest.raises(error) as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="already registered"):

        @register("rope_axial")
        class Other:
            pass

    with pytest.raises(ValueError, match="already registered"):
        register("rope_axial")(type("RopeAxial", (), {"__module__": "elsewhere"}))
    with pytest.raises(ValueError, match="identifier"):
        register("rope-axial")(type("Dashed", (), {}))
    assert REGISTRY["rope_axial"].__name__ == "RopeAxial"


def test_option_types():
    assert Option("n", typing.Optional[int], None).check(None, "e") is None
    assert Option("n", int | None, None).check(3, "e") == 3
    with pytest.raises(TypeError, match="int or None"):
        Option("n", int | None, None).check(3.0, "e")


@pytest.mark.parametrize("name", vitpos.list_encodings())
def test_describe_says_what_where_options_laws_and_source(name):
    text = vitpos.describe(name)
    assert text.startswith(f"{name}: ")
    assert "source" in text
    assert "acts on" in text
    for option in options(name).values():
        assert f"{option.name}={dict(parse(name).terms[0].options)[option.name]!r}" in text
    for law in vitpos.encoding.LAWS:
        holds = any(known.startswith(law) for known in REGISTRY[name].laws)
        assert f"{law}: {'holds' if holds else 'does not hold'}" in text


def test_describe_names_the_nearest():
    with pytest.raises(TypeError, match="name of an encoding is a string, got int 3"):
        vitpos.describe(3)
    with pytest.raises(ValueError, match="did you mean sincos2d"):
        vitpos.describe("sincos")
