"""What one step's answer does not show: builders used again, errors, stored values, fused forms.

Each behaviour is run like a scenario and has a row in the report. Where a backend says that it does
not have one, it is declined.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnmux.testing.behaviours import bad_input, fused_writes, lifecycle, output_quant, round_trip
from attnmux.testing.behaviours.behaviour import Behaviour
from attnmux.testing.declared import Declared

__all__ = ["Behaviour", "behaviours"]


def behaviours(declared: Declared) -> Iterator[Behaviour]:
    """Yield every behaviour that a backend which declares this is held to."""
    yield from lifecycle.BEHAVIOURS
    yield from bad_input.BEHAVIOURS
    yield from round_trip.behaviours(declared)
    yield from output_quant.BEHAVIOURS
    yield from fused_writes.BEHAVIOURS
