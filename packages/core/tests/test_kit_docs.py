"""What the page about the kit promises exists: scenarios, and files of tests."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from attnmux.testing import Target
from attnmux.testing.features import TYPES
from attnmux.testing.sabotage import ToyBackend
from attnmux.testing.scenario import PHASES
from attnmux.testing.verification import scenario_names

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "conformance.md"


@pytest.fixture(scope="module")
def covered() -> list[str]:
    """The last column of the table of reports, a row each."""
    if not PAGE.exists():
        pytest.skip("the tests run without the repository around them")
    table = PAGE.read_text(encoding="utf-8").partition("| kind | seen in | covered by |")[2]
    return [line.split("|")[3] for line in table.splitlines() if line.startswith("| ")]


def test_table_has_a_row_for_each_kind(covered: list[str]) -> None:
    assert len(covered) >= 40


def test_every_scenario_that_the_table_names_exists(covered: list[str]) -> None:
    names = scenario_names(Target(ToyBackend), level="full")
    named = [word for cell in covered for word in re.findall(r"`([^`]+)`", cell)]
    scenarios = [word for word in named if not word.endswith(".py")]
    assert len(scenarios) > 40
    for pattern in scenarios:
        found = [name for name in names if fnmatch(name, pattern)]
        assert found, f"no scenario is called {pattern}"


def test_every_file_that_the_table_names_exists(covered: list[str]) -> None:
    for cell in covered:
        folder = ROOT
        for name in re.findall(r"`([^`]+\.py)`", cell):
            # A bare name lies beside the one before it.
            path = ROOT / name if "/" in name else folder / name
            assert path.exists(), name
            folder = path.parent


def test_every_phase_and_type_is_covered() -> None:
    names = scenario_names(Target(ToyBackend))
    assert {name.partition(".")[0] for name in names} >= set(PHASES)
    assert all(any(feature.name in name for name in names) for feature in TYPES)
