"""Whether what a distribution requires is installed, as far as release numbers tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import importlib_metadata

_REQUIREMENT = re.compile(
    r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(;.*)?$"
)
_CLAUSE = re.compile(r"^(~=|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?$")


@dataclass(frozen=True)
class Mismatch:
    """A requirement that what is installed does not meet.

    Attributes:
        distribution: who requires it.
        requirement: the text of the requirement.
        found: the installed version, or "not installed".
    """

    distribution: str
    requirement: str
    found: str

    @property
    def command(self) -> str:
        """The command that installs what is required."""
        return f'pip install "{self.requirement}"'


def installed_version(name: str) -> str | None:
    """Version of a distribution, or None when it is not installed."""
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return None


def mismatches(
    distribution: str, version_of: Callable[[str], str | None] = installed_version
) -> Iterator[Mismatch]:
    """Requirements of ``distribution`` that are not met.

    Optional ones (extras) and those for other systems are not looked at, nor are clauses that
    release numbers cannot settle.
    """
    try:
        requirements = importlib_metadata.requires(distribution) or []
    except importlib_metadata.PackageNotFoundError:
        return
    for text in requirements:
        if (found := unmet(text, version_of)) is not None:
            yield Mismatch(distribution, text.partition(";")[0].strip(), found)


def unmet(requirement: str, version_of: Callable[[str], str | None]) -> str | None:
    """What is there in place of the requirement; None when it is met or cannot be told."""
    match = _REQUIREMENT.match(requirement.strip())
    if match is None or match.group(3):
        return None
    clauses = [clause.strip() for clause in match.group(2).split(",") if clause.strip()]
    if not all(clause[0] in "<>=!~" for clause in clauses):
        return None  # not a requirement by version (a direct reference, say)
    version = version_of(match.group(1))
    if version is None:
        return "not installed"
    return None if all(_meets(version, clause) for clause in clauses) else version


def _meets(version: str, clause: str) -> bool:
    """Whether a version meets one clause, by release numbers; True when that cannot be told."""
    match = _CLAUSE.match(clause)
    release = re.match(r"\d+(?:\.\d+)*", version)
    if match is None or release is None:
        return True
    operator, bound_text, wildcard = match.groups()
    bound = [int(part) for part in bound_text.split(".")]
    have = [int(part) for part in release.group().split(".")]
    length = max(len(bound), len(have))
    padded = [*have, *[0] * (length - len(have))]
    limit = [*bound, *[0] * (length - len(bound))]
    same = have[: len(bound)] == bound if wildcard else padded == limit
    return {
        "==": same,
        "!=": not same,
        ">=": padded >= limit,
        "<=": padded <= limit,
        ">": padded > limit,
        "<": padded < limit,
        "~=": padded >= limit and padded[: len(bound) - 1] == bound[:-1],
    }[operator]
