"""The kit's part for latent attention: every scenario and every refusal as an outcome."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnmux.kv_cache import KVCacheLayout
from attnmux.request import AttentionRequest
from attnmux.selection import reasons_against
from attnmux.testing.behaviours.behaviour import OTHER
from attnmux.testing.declared import dtype_of
from attnmux.testing.kit import Target, guarded_outcome
from attnmux.testing.mla.refusals import Refusal, mla_refusals, run_mla_refusal
from attnmux.testing.mla.run import run_mla_scenario
from attnmux.testing.mla.scenarios import MlaScenario, mla_scenarios
from attnmux.testing.outcome import Outcome, State

BAD_INPUT = "bad input"
"""Row of the report for what must be refused."""


def mla_outcomes(target: Target, seed: int = 0, only: str | None = None) -> Iterator[Outcome]:
    """Yield the outcome of each scenario for a latent backend; never raises.

    Args:
        target: what is verified; its backend `is_mla()`.
        seed: of all scenarios.
        only: name of the one scenario to run; None runs all.
    """
    for scenario in mla_scenarios(target.backend, seed):
        if only in (None, scenario.name):
            yield _scenario_outcome(target, scenario)
    for refusal in mla_refusals(target.backend):
        if only in (None, _name_of(refusal)):
            yield _refusal_outcome(target, refusal, seed)


def mla_names(target: Target, seed: int = 0) -> tuple[str, ...]:
    """Return the names of all scenarios and refusals for a latent backend."""
    scenarios = (scenario.name for scenario in mla_scenarios(target.backend, seed))
    return (*scenarios, *(_name_of(refusal) for refusal in mla_refusals(target.backend)))


def mla_request_of(
    scenario: MlaScenario, sparse: bool, device: torch.device | str = "cpu"
) -> AttentionRequest:
    """Return what `scenario` asks of selection."""
    return AttentionRequest(
        head_size=scenario.head_size,
        dtype=dtype_of(scenario.dtype),
        kv_cache_dtype=scenario.kv_cache_dtype,
        block_size=scenario.block_size,
        use_mla=True,
        use_sparse=sparse,
        use_non_causal=not scenario.causal or scenario.per_request_causal,
        use_per_request_causal=scenario.per_request_causal,
        num_heads=scenario.num_heads,
        num_kv_heads=1,
        device=str(device),
        kv_cache_layout=KVCacheLayout[scenario.layout],
    )


def _scenario_outcome(target: Target, scenario: MlaScenario) -> Outcome:
    def body() -> tuple[State, tuple[str, ...]]:
        request = mla_request_of(scenario, target.backend.is_sparse(), target.device)
        if reasons := reasons_against(target.backend, request):
            return State.DECLINED, tuple(str(reason) for reason in reasons)
        run_mla_scenario(target.backend, scenario, device=target.device, options=target.options)
        return State.PROVED, ()

    return guarded_outcome(
        target,
        scenario.name,
        scenario.seed,
        scenario.topics,
        scenario.phase,
        body,
        str(scenario),
    )


def _refusal_outcome(target: Target, refusal: Refusal, seed: int) -> Outcome:
    def body() -> tuple[State, tuple[str, ...]]:
        said = run_mla_refusal(
            target.backend, refusal, device=target.device, options=target.options
        )
        return State.PROVED, (said,)

    return guarded_outcome(target, _name_of(refusal), seed, (BAD_INPUT,), OTHER, body)


def _name_of(refusal: Refusal) -> str:
    return f"mla.refuse.{refusal.name}"
