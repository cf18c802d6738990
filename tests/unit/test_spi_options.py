"""Runner options arrive as texts and leave as checked values."""

from pathlib import Path

import pytest

from runnerd_sim.options import OPTIONS, SimOptions
from runnerd_sim.plugin import SIM
from runnerd_spi import InvalidOption, OptionValue, RunnerCapabilities, RunnerOption, RunnerPlugin, parse_options

PLUGIN = RunnerPlugin(
    name="acme",
    description="",
    capabilities=RunnerCapabilities(1, ("float32",), (16,)),
    create=SIM.create,
    options=(
        RunnerOption("path", str, None, ""),
        RunnerOption("count", int, 3, ""),
        RunnerOption("share", float, 0.5, ""),
        RunnerOption("fast", bool, False, ""),
    ),
)


def test_unset_options_hold_their_defaults_and_those_without_one_are_left_out() -> None:
    assert parse_options(PLUGIN, {}) == {"count": 3, "share": 0.5, "fast": False}


def test_texts_are_converted_to_the_declared_types() -> None:
    values = parse_options(PLUGIN, {"path": str(Path("a", "b")), "count": "7", "share": "1e-3", "fast": "yes"})
    assert values == {"path": "a/b", "count": 7, "share": 0.001, "fast": True}
    assert [type(values[name]) for name in ("path", "count", "share", "fast")] == [str, int, float, bool]


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("ON", True), (" yes ", True), ("false", False), ("0", False), ("No", False)],
)
def test_booleans_are_read_as_people_write_them(text: str, value: bool) -> None:
    assert parse_options(PLUGIN, {"fast": text})["fast"] is value


@pytest.mark.parametrize(("name", "text"), [("count", "many"), ("count", "1.5"), ("share", ""), ("fast", "maybe")])
def test_a_value_of_the_wrong_type_names_the_option_and_the_value(name: str, text: str) -> None:
    with pytest.raises(InvalidOption, match=rf"'acme': option {name} takes .*{text!r}"):
        parse_options(PLUGIN, {name: text})


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(InvalidOption, match=r"'acme' has no option 'colour'; it has: count, fast, path, share"):
        parse_options(PLUGIN, {"colour": "red"})


def test_the_declared_defaults_of_the_simulated_runner_are_valid() -> None:
    assert SimOptions.from_mapping(parse_options(SIM, {})) == SimOptions.from_mapping({})


@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_each_simulated_option_reaches_the_field_of_its_name(name: str) -> None:
    option = next(one for one in OPTIONS if one.name == name)
    values: dict[type, OptionValue] = {int: 41, float: 1.25, str: "text", bool: True}
    given = parse_options(SIM, {name: str(values[option.type])})
    fields = {one.name: getattr(SimOptions.from_mapping(given), one.name) for one in OPTIONS}
    assert fields == {one.name: one.default for one in OPTIONS} | {name: values[option.type]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_seconds", -0.1),
        ("copy_seconds", float("nan")),
        ("stall_seconds", float("inf")),
        ("load_seconds", True),
        ("num_blocks", 0),
        ("num_blocks", 2.5),
        ("fail_at_step", -1),
        ("script", ""),
        ("kv_shadow", "true"),
        ("colour", 1),
    ],
)
def test_a_simulated_option_out_of_range_is_refused_by_name(name: str, value: OptionValue) -> None:
    with pytest.raises(InvalidOption, match=name):
        SimOptions.from_mapping({name: value})
