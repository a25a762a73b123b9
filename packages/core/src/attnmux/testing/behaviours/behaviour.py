"""One behaviour: a name, a row of the report, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from attnmux.testing.case import Case, make_case
from attnmux.testing.declared import Declared
from attnmux.testing.generate import plain_scenario
from attnmux.testing.kit import Target, guarded_outcome
from attnmux.testing.outcome import Outcome, State
from attnmux.testing.road import make_builder, spec_of
from attnmux.testing.scenario import Scenario

Tried = tuple[State, tuple[str, ...]]
PROVED: Tried = (State.PROVED, ())
OTHER = "other"
"""Column of the report for what belongs to no phase."""


@dataclass(frozen=True)
class Behaviour:
    """Something that a backend does right, says that it does not have, or fails.

    Attributes:
        name: as for scenarios.
        title: row of the report.
        attempt: tries it; raises `NonConformanceError` when it is wrong.
    """

    name: str
    title: str
    attempt: Callable[[Target, Declared, int], Tried]

    def run(self, target: Target, declared: Declared, seed: int) -> Outcome:
        """Try it; never raises."""
        return guarded_outcome(
            target,
            self.name,
            seed,
            (self.title,),
            OTHER,
            lambda: self.attempt(target, declared, seed),
        )


def draw(declared: Declared, phase: str, seed: int, name: str) -> Scenario:
    """Draw a plain scenario for a behaviour: float32 or the first dtype, contiguous, not flat."""
    return plain_scenario(declared, phase, Random(f"{seed}:{name}"), seed)


def prepare(target: Target, scenario: Scenario) -> tuple[Case, Any]:
    """Make the case of a scenario and the builder for it."""
    builder = make_builder(target.backend, scenario, target.device, target.options)
    ordered = scenario.in_order_for(builder.reorder_batch_threshold)
    return make_case(ordered, spec_of(ordered, target.backend), target.device), builder
