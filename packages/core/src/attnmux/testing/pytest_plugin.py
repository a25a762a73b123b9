"""The kit's pytest plugin: parameters of `BackendConformance`, and fixtures that poison memory.

Loaded by every pytest run where attnmux is installed, so it imports nothing of weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from attnmux.testing.conformance import BackendConformance, scenarios_of

if TYPE_CHECKING:
    from attnmux.testing.poison import PoisonedAllocations

_PARAMETER = "attnmux_scenario"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `BackendConformance.test_conforms` one run for each scenario of its backend."""
    cls = metafunc.cls
    if _PARAMETER not in metafunc.fixturenames:
        return
    if not isinstance(cls, type) or not issubclass(cls, BackendConformance):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: {_PARAMETER} is for subclasses of BackendConformance"
        )
    if not cls.backend:
        raise pytest.UsageError(f"{cls.__name__}: set `backend` to the name of a backend")
    names = scenarios_of(cls)
    metafunc.parametrize(_PARAMETER, names, ids=names)


@pytest.fixture
def poisoned_allocations() -> Iterator[PoisonedAllocations]:
    """Fill what `torch.empty` and its kin return with NaN, for the length of a test."""
    from attnmux.testing.poison import PoisonedAllocations

    with PoisonedAllocations() as poisoned:
        yield poisoned
