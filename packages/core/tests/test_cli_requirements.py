from __future__ import annotations

import pytest

from attnmux.cli.requirements import unmet

INSTALLED = {"torch": "2.13.0+cpu", "one": "1.4.2", "odd": "unknown"}


@pytest.mark.parametrize(
    ("requirement", "found"),
    [
        ("torch>=2.11", None),
        ("torch>=2.13", None),
        ("torch>2.13", "2.13.0+cpu"),
        ("torch==2.13.0", None),
        ("torch==2.12.*", "2.13.0+cpu"),
        ("torch==2.13.*", None),
        ("one>=1,<2", None),
        ("one>=1,<1.4", "1.4.2"),
        ("one (>=1.5)", "1.4.2"),
        ("one!=1.4.2", "1.4.2"),
        ("one~=1.4", None),
        ("one~=1.5.0", "1.4.2"),
        ("one[extra]>=1", None),
        ("one", None),
        ("missing>=1", "not installed"),
        ('missing>=1; extra == "test"', None),  # optional: not looked at
        ("odd>=1", None),  # not a number: cannot be told
        ("not a requirement !", None),
    ],
)
def test_a_requirement_is_met_or_what_is_there_is_named(requirement: str, found) -> None:
    assert unmet(requirement, INSTALLED.get) == found
