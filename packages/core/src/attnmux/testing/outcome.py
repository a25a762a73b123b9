"""What the kit found: one outcome for each scenario, and a failure that reads like a bug report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """What one scenario says about a backend."""

    PROVED = "proved"
    """Declared, run, right."""
    DECLINED = "declined"
    """Not declared, and refused with a reason before anything was written."""
    FAILED = "FAILED"
    """Declared and wrong, or not declared and not refused."""
    NOT_RUN = "not run here"
    """The kit cannot judge it, or not on this machine."""


@dataclass(frozen=True)
class Failure:
    """A bug report.

    Attributes:
        backend: name of the backend.
        name, seed: of the scenario; with the backend they repeat the run.
        what: one sentence.
        where: the first and the worst place, where there is one.
        likely: what it looks like, "" when nothing fits.
        scenario: the scenario as a call, "" where there is none.
        trace: the end of a traceback, "" where nothing was raised.
    """

    backend: str
    name: str
    seed: int
    what: str
    where: str = ""
    likely: str = ""
    scenario: str = ""
    trace: str = ""
    device: str = "cpu"

    @property
    def command(self) -> str:
        """The command that repeats this run alone."""
        device = "" if self.device == "cpu" else f" --device {self.device}"
        return (
            f"attnmux verify --backend {self.backend} --scenario '{self.name}'"
            f" --seed {self.seed}{device}"
        )

    def __str__(self) -> str:
        """Return the report as indented text."""
        lines = [f"FAILED {self.name}: {self.what}"]
        if self.likely:
            lines.append(f"  looks as if {self.likely}")
        lines += [f"  {line}" for line in self.where.splitlines()]
        lines.append(f"  repeat: {self.command}")
        if self.scenario:
            lines.append(f"  scenario: {self.scenario}")
        lines += [f"  | {line}" for line in self.trace.splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """The state of one scenario.

    Attributes:
        name: of the scenario.
        topics: rows of the report that it counts for.
        column: column of the report.
        state: what it says.
        reasons: why it was declined or not run.
        failure: set when FAILED.
        seconds: wall time.
    """

    name: str
    topics: tuple[str, ...]
    column: str
    state: State
    reasons: tuple[str, ...] = ()
    failure: Failure | None = None
    seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        data: dict[str, Any] = {
            "name": self.name,
            "topics": list(self.topics),
            "column": self.column,
            "state": self.state.value,
            "reasons": list(self.reasons),
            "seconds": round(self.seconds, 4),
        }
        if self.failure is not None:
            data["failure"] = {
                "what": self.failure.what,
                "likely": self.failure.likely,
                "where": self.failure.where,
                "command": self.failure.command,
                "scenario": self.failure.scenario,
                "trace": self.failure.trace,
            }
        return data


class NonConformanceError(Exception):
    """A backend did something that the contract forbids; becomes a `Failure`."""

    def __init__(self, what: str, where: str = "", likely: str = "") -> None:
        """Keep the sentence, the place and the likely kind apart."""
        super().__init__(what)
        self.what, self.where, self.likely = what, where, likely
