"""The conformance kit: is a backend right, and does it refuse what it cannot do?

The short ways in are `attnmux verify` and a one-line class in a plugin's own tests::

    from attnmux.testing import BackendConformance

    class TestMyBackend(BackendConformance):
        backend = "MY_BACKEND"

Names are imported when they are first used: pytest loads this package in every run of everybody who
has attnmux installed, and must not pay for torch there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnmux.testing.conformance import BackendConformance
    from attnmux.testing.kit import Target
    from attnmux.testing.matrix import Matrix
    from attnmux.testing.outcome import Outcome, State
    from attnmux.testing.problem import AttentionProblem
    from attnmux.testing.reference import reference_attention
    from attnmux.testing.tolerances import budget_for, judge, judge_lse
    from attnmux.testing.verification import outcome_of, outcomes, verify

__all__ = [
    "AttentionProblem",
    "BackendConformance",
    "Matrix",
    "Outcome",
    "State",
    "Target",
    "budget_for",
    "judge",
    "judge_lse",
    "outcome_of",
    "outcomes",
    "reference_attention",
    "verify",
]

_HOME = {
    "AttentionProblem": "problem",
    "BackendConformance": "conformance",
    "Matrix": "matrix",
    "Outcome": "outcome",
    "State": "outcome",
    "Target": "kit",
    "budget_for": "tolerances",
    "judge": "tolerances",
    "judge_lse": "tolerances",
    "outcome_of": "verification",
    "outcomes": "verification",
    "reference_attention": "reference",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
