"""The design: contrast of every colour, and the names of states and colours."""

import json
import re
from collections.abc import Iterator
from itertools import product

import pytest

from taskyard import design
from taskyard.core.states import TaskState

MODES = ("light", "dark")


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", MODES)
def test_text_is_readable_on_every_surface(mode: str) -> None:
    colours = design.TEXT[mode]
    surfaces = {"ground", "card", "good-ground", "bad-ground"}
    text = colours.keys() - surfaces - {"line"}
    pairs = [*product(sorted(text), ("ground", "card")), ("good", "good-ground")]
    assert {
        (front, back): contrast(colours[front], colours[back])
        for front, back in [*pairs, ("bad", "bad-ground")]
        if contrast(colours[front], colours[back]) < 4.5
    } == {}


@pytest.mark.parametrize("mode", MODES)
def test_series_stand_out_from_the_ground(mode: str) -> None:
    ground = design.TEXT[mode]["ground"]
    palette = design.PALETTES[mode]
    ratios = {name: contrast(palette[name[1:]], ground) for name in design.SERIES}
    assert {name for name, ratio in ratios.items() if ratio < 3} == set()
    assert {name for name in ("ink", "quiet") if contrast(palette[name], ground) < 4.5} == set()


def test_every_state_has_a_word_and_a_colour() -> None:
    assert list(design.STATES) == [state.name.lower() for state in TaskState]
    for mode, (name, one) in product(MODES, design.STATES.items()):
        assert one.word
        assert one.meaning
        assert design.PALETTES[mode][name] == design.PALETTES[mode][one.chart_colour]


def named_colours(value: object) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("@"):
        yield value[1:]
    for one in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from named_colours(one)


def test_template_names_only_colours_of_both_palettes() -> None:
    used = set(named_colours(design.TEMPLATE))
    assert used >= {"ink", "quiet", "line", "blue"}
    assert [used - design.PALETTES[mode].keys() for mode in MODES] == [set(), set()]


def test_stylesheet_defines_every_property_that_it_uses() -> None:
    sheet = design.stylesheet()
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", sheet)) <= set(
        re.findall(r"(--[a-z0-9-]+):", sheet)
    )
    light, dark = (sheet.split("{", 2)[1], sheet.split("dark) {")[1])
    assert f"--state-done: {design.TEXT['light']['good']};" in light
    assert f"--state-done: {design.TEXT['dark']['good']};" in dark


def test_script_holds_the_palettes_and_the_template() -> None:
    found = dict(re.findall(r"^const (\w+) = (\{.*\});$", design.script(), re.MULTILINE))
    assert json.loads(found["palettes"]) == design.PALETTES
    assert json.loads(found["template"]) == design.TEMPLATE
