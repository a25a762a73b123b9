"""The report of a verification: a matrix of features and phases, as text, JSON and JUnit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from attnmux.testing.outcome import Failure, Outcome, State

COLUMNS = ("prefill", "extend", "decode", "mixed", "pairs", "other")
_EMPTY = "-"
_SHOWN_FAILURES = 10
_LEGEND = (
    "proved: declared, run and right.  declined: not declared, and refused with a reason.\n"
    "FAILED: declared and wrong, or neither declared nor refused.  "
    "not run here: cannot be judged here.\n"
    "prefill: no context.  extend: several tokens after a context.  decode: one token.  "
    "mixed: all in one\nbatch.  pairs: with each other feature.  other: what belongs to no phase."
)


@dataclass(frozen=True)
class Matrix:
    """What was found about one backend.

    Attributes:
        backend: its name.
        origin: distribution and version, or "".
        device, seed, level: how it was verified.
        outcomes: one for each scenario.
        notes: what a reader should know beside that.
    """

    backend: str
    origin: str
    device: str
    seed: int
    level: str
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Every failure, in the order of the scenarios."""
        return tuple(outcome.failure for outcome in self.outcomes if outcome.failure is not None)

    @property
    def seconds(self) -> float:
        """Wall time of all scenarios."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def counts(self) -> dict[State, int]:
        """How many scenarios are in each state."""
        counted = Counter(outcome.state for outcome in self.outcomes)
        return {state: counted[state] for state in State}

    def rows(self) -> dict[str, dict[str, list[Outcome]]]:
        """Row of the report → column → its outcomes, rows in order of first appearance."""
        rows: dict[str, dict[str, list[Outcome]]] = {}
        for outcome in self.outcomes:
            for topic in outcome.topics:
                rows.setdefault(topic, {}).setdefault(outcome.column, []).append(outcome)
        return rows

    def __str__(self) -> str:
        """Return the matrix, the failures and a last line that sums up."""
        return "\n".join([*self._head(), "", *self._table(), "", *self._tail()])

    def _head(self) -> list[str]:
        where = f"{self.backend} ({self.origin})" if self.origin else self.backend
        lines = [f"{where} on {self.device}, seed {self.seed}, level {self.level}"]
        return lines + [f"note: {note}" for note in self.notes]

    def _table(self) -> list[str]:
        rows = self.rows()
        used = [name for name in COLUMNS if any(name in columns for columns in rows.values())]
        cells = {
            topic: [cell_text(columns.get(name, ())) for name in used]
            for topic, columns in rows.items()
        }
        first = max(len(topic) for topic in [*rows, ""])
        widths = [
            max(len(name), *(len(line[i]) for line in cells.values()))
            for i, name in enumerate(used)
        ]
        lines = [_line("", used, first, widths)]
        lines += [_line(topic, line, first, widths) for topic, line in cells.items()]
        return lines

    def _tail(self) -> list[str]:
        lines = _LEGEND.splitlines()
        failures = self.failures
        for failure in failures[:_SHOWN_FAILURES]:
            lines += ["", str(failure)]
        if len(failures) > _SHOWN_FAILURES:
            lines += ["", f"and {len(failures) - _SHOWN_FAILURES} more failures:"]
            lines += [f"  {failure.name}: {failure.what}" for failure in failures[_SHOWN_FAILURES:]]
        counts = ", ".join(f"{n} {state.value}" for state, n in self.counts().items())
        verdict = "conforms" if not failures else "does NOT conform"
        return [*lines, "", f"{self.backend} {verdict}: {counts} ({self.seconds:.1f} s)"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "backend": self.backend,
            "origin": self.origin,
            "device": self.device,
            "seed": self.seed,
            "level": self.level,
            "conforms": not self.failures,
            "counts": {state.value: n for state, n in self.counts().items()},
            "notes": list(self.notes),
            "matrix": {
                topic: {name: cell_text(found) for name, found in columns.items()}
                for topic, columns in self.rows().items()
            },
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
        }

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_junit(self) -> ElementTree.Element:
        """Return a JUnit test suite; what was declined or not run counts as skipped."""
        counts = self.counts()
        skipped = counts[State.DECLINED] + counts[State.NOT_RUN]
        suite = ElementTree.Element(
            "testsuite",
            name=f"attnmux verify {self.backend}",
            tests=str(len(self.outcomes)),
            failures=str(counts[State.FAILED]),
            skipped=str(skipped),
            time=f"{self.seconds:.3f}",
        )
        for outcome in self.outcomes:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"attnmux.{self.backend}",
                name=outcome.name,
                time=f"{outcome.seconds:.3f}",
            )
            if outcome.failure is not None:
                found = ElementTree.SubElement(case, "failure", message=outcome.failure.what)
                found.text = str(outcome.failure)
            elif outcome.state is not State.PROVED:
                message = f"{outcome.state.value}: {'; '.join(outcome.reasons)}"
                ElementTree.SubElement(case, "skipped", message=message)
        return suite


def cell_text(outcomes: Iterable[Outcome]) -> str:
    """Return what a cell says: the worst state, with how many where they differ."""
    counted = Counter(outcome.state for outcome in outcomes)
    total = sum(counted.values())
    if not total:
        return _EMPTY
    if counted[State.FAILED]:
        return f"{State.FAILED.value} {counted[State.FAILED]}/{total}"
    if len(counted) == 1:
        return next(iter(counted)).value
    if counted[State.PROVED]:
        # A pair with a feature that is declined, or a size that is: the rest is proved.
        return f"proved {counted[State.PROVED]}/{total}"
    return State.DECLINED.value


def _line(first: str, cells: Iterable[str], first_width: int, widths: list[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([first.ljust(first_width), *padded]).rstrip()
