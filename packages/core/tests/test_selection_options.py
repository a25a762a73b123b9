"""Options of backends: by keyword, by environment, typed, with clear errors."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Literal

import pytest

from attnmux.options import (
    describe_options,
    resolve_options_in,
    warn_unknown_option_variables,
)
from attnmux.plugins import BackendInfo, Registry


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclass(frozen=True)
class Options:
    splits: int = 4
    threshold: float = 0.5
    debug: bool = False
    label: str = "x"
    order: Literal["row", "col"] = "row"
    mode: Mode = Mode.FAST
    limit: int | None = None
    path: str | None = "p"


@dataclass(frozen=True)
class Other:
    splits: int = 1


@dataclass
class Thawed:
    x: int = 1


@dataclass(frozen=True)
class NoDefault:
    x: int


@dataclass(frozen=True)
class OddType:
    x: tuple[int, ...] = ()


@pytest.fixture
def registry() -> Registry:
    made = Registry(lambda: [])
    made.register(BackendInfo("FAST", "m:X", options=Options))
    made.register(BackendInfo("FAST_MLA", "m:X", options=Other))
    made.register(BackendInfo("PLAIN", "m:X"))
    return made


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("SPLITS", "8", 8),
        ("SPLITS", " -2 ", -2),
        ("THRESHOLD", "1e-3", 1e-3),
        ("DEBUG", "yes", True),
        ("DEBUG", "0", False),
        ("LABEL", "none", "none"),
        ("ORDER", "col", "col"),
        ("MODE", "exact", Mode.EXACT),
        ("MODE", "EXACT", Mode.EXACT),
        ("LIMIT", "none", None),
        ("LIMIT", "7", 7),
        ("PATH", "none", None),
        ("PATH", "/tmp/x", "/tmp/x"),
    ],
)
def test_the_environment_sets_a_field_by_its_type(registry, field, text, value) -> None:
    options = resolve_options_in(registry, "FAST", {}, {f"ATTNMUX_OPT_FAST_{field}": text})
    assert getattr(options, field.lower()) == value
    assert type(getattr(options, field.lower())) is type(value)


def test_defaults_then_environment_then_keyword(registry) -> None:
    environ = {"ATTNMUX_OPT_FAST_SPLITS": "8"}
    assert resolve_options_in(registry, "FAST", {}, {}) == Options()
    assert resolve_options_in(registry, "FAST", {}, environ).splits == 8
    assert resolve_options_in(registry, "FAST", {"splits": 2}, environ).splits == 2


def test_a_variable_belongs_to_the_backend_of_the_longest_name(registry) -> None:
    environ = {"ATTNMUX_OPT_FAST_MLA_SPLITS": "3"}
    assert resolve_options_in(registry, "FAST", {}, environ) == Options()
    assert resolve_options_in(registry, "FAST_MLA", {}, environ).splits == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("threshold", 1), ("limit", None), ("mode", Mode.EXACT), ("order", "col"), ("debug", True)],
)
def test_a_keyword_of_the_right_type_is_taken(registry, name, value) -> None:
    assert getattr(resolve_options_in(registry, "FAST", {name: value}, {}), name) == value


ERRORS = {
    "text is no integer": (
        {},
        {"ATTNMUX_OPT_FAST_SPLITS": "many"},
        "ATTNMUX_OPT_FAST_SPLITS: got 'many'; allowed: an integer",
    ),
    "text is no choice": (
        {},
        {"ATTNMUX_OPT_FAST_ORDER": "diag"},
        "ATTNMUX_OPT_FAST_ORDER: got 'diag'; allowed: 'row' | 'col'",
    ),
    "text is no member": (
        {},
        {"ATTNMUX_OPT_FAST_MODE": "slow"},
        "ATTNMUX_OPT_FAST_MODE: got 'slow'; allowed: FAST | EXACT",
    ),
    "text is no truth": (
        {},
        {"ATTNMUX_OPT_FAST_DEBUG": "maybe"},
        "ATTNMUX_OPT_FAST_DEBUG: got 'maybe'; allowed: true or false",
    ),
    "variable misspells a field": (
        {},
        {"ATTNMUX_OPT_FAST_SPLIT": "1"},
        "ATTNMUX_OPT_FAST_SPLIT: FAST has no option 'SPLIT'; did you mean SPLITS?",
    ),
    "keyword misspells a field": (
        {"treshold": 1.0},
        {},
        "treshold: FAST has no option 'treshold'; did you mean threshold? options: splits",
    ),
    "keyword of another type": ({"splits": "8"}, {}, "splits: got '8'; allowed: an integer"),
    "truth is no integer": ({"splits": True}, {}, "splits: got True; allowed: an integer"),
    "integer is no truth": ({"debug": 1}, {}, "debug: got 1; allowed: true or false"),
    "none where none may be": ({"splits": None}, {}, "splits: got None; allowed: an integer"),
    "value is no choice": ({"order": "diag"}, {}, "order: got 'diag'; allowed: 'row' | 'col'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_bad_option_is_an_error_that_says_what_is_allowed(registry, case: str) -> None:
    keywords, environ, text = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        resolve_options_in(registry, "FAST", keywords, environ)


def test_a_backend_without_options_refuses_them(registry) -> None:
    assert resolve_options_in(registry, "PLAIN", {}, {}) is None
    with pytest.raises(ValueError, match="PLAIN has no options"):
        resolve_options_in(registry, "PLAIN", {"x": 1}, {})
    with pytest.raises(ValueError, match="ATTNMUX_OPT_PLAIN_X is set, but PLAIN has no options"):
        resolve_options_in(registry, "PLAIN", {}, {"ATTNMUX_OPT_PLAIN_X": "1"})


def test_an_unknown_backend_gets_the_closest_name(registry) -> None:
    with pytest.raises(ValueError, match=r"backend: got 'FSAT' \(did you mean 'FAST'\?\)"):
        resolve_options_in(registry, "FSAT", {}, {})


def test_a_variable_of_no_backend_is_warned_about(registry) -> None:
    with pytest.warns(UserWarning, match=r"ATTNMUX_OPT_SLOW_X is set, but no known backend"):
        warn_unknown_option_variables(registry, {"ATTNMUX_OPT_SLOW_X": "1"})


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (Thawed, "a frozen dataclass"),
        (int, "a frozen dataclass"),
        (NoDefault, "NoDefault.x has no default"),
        (OddType, "has type tuple[int, ...]; allowed: bool, int"),
        ("no_such_module:Options", "no_such_module:Options not found"),
        ("enum:NoSuchClass", "enum:NoSuchClass not found"),
    ],
)
def test_options_that_are_declared_wrongly_are_named(registry, declared, text: str) -> None:
    registry.register(BackendInfo("ODD", "m:X", options=declared))
    with pytest.raises(ValueError, match=re.escape(text)):
        resolve_options_in(registry, "ODD", {}, {})


def test_options_named_by_path_are_imported_when_resolved(workshop) -> None:
    module = workshop.module(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass O:\n    n: int = 3\n"
    )
    registry = Registry(lambda: [])
    registry.register(BackendInfo("A", "m:X", options=f"{module}:O"))
    assert resolve_options_in(registry, "A", {"n": 4}, {}).n == 4


def test_options_are_described(registry) -> None:
    described = {field.name: field for field in describe_options(registry.backends()["FAST"].info)}
    assert described["limit"].variable == "ATTNMUX_OPT_FAST_LIMIT"
    assert described["limit"].allowed == "an integer | None"
    assert described["order"].default == "'row'"
