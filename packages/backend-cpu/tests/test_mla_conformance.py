"""Both latent backends on every scenario and every refusal of the conformance kit."""

from __future__ import annotations

import pytest

from attnmux.testing.mla.refusals import Refusal, mla_refusals, run_mla_refusal
from attnmux.testing.mla.run import run_mla_scenario
from attnmux.testing.mla.scenarios import MlaScenario, mla_scenarios
from attnmux_cpu.mla_backend import CPUMLABackend, CPUMLASparseBackend
from attnmux_cpu.options import CPUMLAOptions

BACKENDS = (CPUMLABackend, CPUMLASparseBackend)
SMALL = CPUMLAOptions(context_tokens=7, decode_tokens=5)
"""Nothing fits: every context takes several rounds, every list several tiles."""


def named(backend: type[CPUMLABackend], item: MlaScenario | Refusal) -> str:
    return f"{backend.get_name()}-{item.name.removeprefix('mla.')}"


SCENARIOS = [
    pytest.param(backend, scenario, id=named(backend, scenario))
    for backend in BACKENDS
    for scenario in mla_scenarios(backend)
]
REFUSALS = [
    pytest.param(backend, refusal, id=named(backend, refusal))
    for backend in BACKENDS
    for refusal in mla_refusals(backend)
]
# What differs with the workspace; the rest only repeats it.
TILED = ("plain", "drafts", "heads_3", "deepseek_sizes", "dummy_rows", "fused", "non_causal")
TILED_SCENARIOS = [
    param
    for param in SCENARIOS
    if param.values[1].name.rsplit(".", 1)[-1] in TILED or "fp8_e4m3" in param.values[1].name
]


@pytest.mark.parametrize(("backend", "scenario"), SCENARIOS)
def test_scenario_is_right(backend: type[CPUMLABackend], scenario: MlaScenario) -> None:
    assert run_mla_scenario(backend, scenario) <= 1.0


@pytest.mark.parametrize(("backend", "scenario"), TILED_SCENARIOS)
def test_scenario_is_right_in_the_smallest_workspace(
    backend: type[CPUMLABackend], scenario: MlaScenario
) -> None:
    assert run_mla_scenario(backend, scenario, options=SMALL) <= 1.0


@pytest.mark.parametrize(("backend", "refusal"), REFUSALS)
def test_bad_input_is_refused_with_a_sentence(
    backend: type[CPUMLABackend], refusal: Refusal
) -> None:
    said = run_mla_refusal(backend, refusal)
    assert ": got " in said
    assert "; allowed: " in said
