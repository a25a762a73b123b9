"""Run a backend on scenarios, and say for each whether it is proved, declined or FAILED."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.testing.case import Case, make_case
from attnmux.testing.generate import Recipe
from attnmux.testing.judging import judge_log_sum_exp, judge_output
from attnmux.testing.outcome import Failure, NonConformanceError, Outcome, State
from attnmux.testing.paged_write import write_complaint
from attnmux.testing.poison import PoisonedAllocations, Watch
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import ReferenceResult, solve
from attnmux.testing.road import make_builder, make_impl, reasons_against, request_of, spec_of
from attnmux.testing.scenario import Scenario
from attnmux.testing.tolerances import Budget, budget_for
from attnmux.testing.variants import invisible_variant
from attnmux.testing.watching import InputWatch, watch_cache, watch_output

_ATTEMPTS = 25
"""Draws of one scenario until each mistake of its features shows; two are usually enough."""


@dataclass(frozen=True)
class Target:
    """What is verified."""

    backend: type[AttentionBackend]
    device: str = "cpu"
    options: object | None = None
    name: str = ""

    @property
    def label(self) -> str:
        """The backend's name as users write it."""
        return self.name or self.backend.get_name()


@dataclass(frozen=True)
class Answered:
    """A case with its right answer."""

    case: Case
    problem: AttentionProblem
    exact: ReferenceResult
    budget: Budget


def run_recipe(target: Target, recipe: Recipe) -> Outcome:
    """Draw a scenario that shows its features, run it, and judge it; never raises."""
    scenario = recipe.scenario()
    column = "pairs" if "+" in recipe.name else scenario.phase

    def body() -> tuple[State, tuple[str, ...]]:
        reasons = reasons_against(target.backend, request_of(scenario, target.device))
        if reasons:
            check_refusal(target, scenario)
            return State.DECLINED, tuple(str(reason) for reason in reasons)
        return run_visible(target, recipe)

    return guarded_outcome(
        target, recipe.name, recipe.seed, scenario.topics, column, body, str(scenario)
    )


def guarded_outcome(
    target: Target,
    name: str,
    seed: int,
    topics: tuple[str, ...],
    column: str,
    body: Callable[[], tuple[State, tuple[str, ...]]],
    scenario: str = "",
) -> Outcome:
    """Turn what `body` does into an outcome: its state, or a failure with a report."""
    start = time.perf_counter()
    failure: Failure | None = None
    state, reasons = State.FAILED, tuple[str, ...]()
    try:
        state, reasons = body()
    except NonConformanceError as error:
        failure = Failure(target.label, name, seed, error.what, error.where, error.likely, scenario)
    except Exception as error:  # whatever a backend raises is its failure, not the kit's end
        failure = Failure(
            target.label,
            name,
            seed,
            f"raised {type(error).__name__}: {_first_line(error)}",
            scenario=scenario,
            trace=_end_of_traceback(error),
        )
    if failure is not None:
        failure = replace(failure, device=target.device)
    return Outcome(name, topics, column, state, reasons, failure, time.perf_counter() - start)


def run_visible(target: Target, recipe: Recipe) -> tuple[State, tuple[str, ...]]:
    """Run the first draw of `recipe` in which every mistake of its features would show."""
    for attempt in range(_ATTEMPTS):
        scenario = recipe.scenario(attempt)
        builder = make_builder(target.backend, scenario, target.device, target.options)
        scenario = scenario.in_order_for(builder.reorder_batch_threshold)
        spec = spec_of(scenario, target.backend)
        case = make_case(scenario, spec, target.device)
        answered = answer(case)
        hidden = invisible_variant(case.problem, answered.exact, answered.budget)
        if hidden is None:
            return run_case(target, answered, builder)
    raise RuntimeError(
        f"the kit drew {_ATTEMPTS} scenarios and in each one nothing shows when {hidden.kind}: "
        "report it to attnmux, it says nothing about the backend"
        if hidden
        else "no attempt was made"
    )


def answer(case: Case, problem: AttentionProblem | None = None) -> Answered:
    """Compute what is right for `case`, and how far off it may be."""
    problem = problem or case.problem
    exact = solve(problem)
    return Answered(case, problem, exact, budget_for(problem, exact))


def run_case(target: Target, answered: Answered, builder: Any) -> tuple[State, tuple[str, ...]]:
    """Run one case through builder and impl, and judge all that it left behind.

    Raises:
        NonConformanceError: something is not as the contract says.
    """
    case = answered.case
    inputs = InputWatch.of(case)
    impl = impl_for(target, case)
    try:
        metadata = build(builder, case)
        inputs.check("build")
        answered = _update_cache(target, answered, impl)
        inputs.check("do_kv_cache_update")
    except ValueError as error:
        if case.scenario.index_dtype == "int64" and "int32" in str(error):
            return State.DECLINED, (f"int64 indices: {error}",)
        raise
    output = _forward(target, answered, impl, metadata)
    inputs.check("forward")
    judge_output(case, output, answered.problem, answered.exact, answered.budget)
    if target.backend.supports_lse():
        _forward_with_lse(target, answered, impl, metadata)
        inputs.check("forward_with_lse")
    return State.PROVED, ()


def impl_for(target: Target, case: Case) -> Any:
    """Make the impl that `case` asks for."""
    return make_impl(
        target.backend,
        case.scenario,
        scale=case.scale,
        alibi_slopes=case.alibi_slopes,
        sinks=case.sinks,
        options=target.options,
    )


def build(builder: Any, case: Case) -> Any:
    """Build the step's metadata; nothing is shared, so no prefix is common."""
    return builder.build(0, case.metadata)


def _update_cache(target: Target, answered: Answered, impl: Any) -> Answered:
    """Write the new rows where `forward` does not, and check the write."""
    case = answered.case
    if target.backend.forward_includes_kv_cache_update or not case.writes_cache:
        return answered
    watch = watch_cache(case, may_write=True)
    impl.do_kv_cache_update(
        case.layer, case.key, case.value, case.kv_cache, case.metadata.slot_mapping
    )
    if found := watch.complaint():
        raise NonConformanceError(f"do_kv_cache_update wrote outside its slots: {found}")
    return check_written(answered)


def check_written(answered: Answered) -> Answered:
    """Check the new rows in the cache; return what is right for the values that are in it.

    Raises:
        NonConformanceError: a row reads back as something else than was written.
    """
    case = answered.case
    assert case.key is not None
    assert case.value is not None
    rows = slice(0, case.slots.numel())
    found = write_complaint(
        case.kv_cache,
        case.full_cache,
        case.slots,
        case.key[rows],
        case.value[rows],
        case.content,
    )
    if found:
        raise NonConformanceError(found)
    same = torch.equal(
        case.kv_cache.contiguous().view(torch.uint8), case.full_cache.contiguous().view(torch.uint8)
    )
    if same:
        return answered
    # A value on a tie may fall either way; what counts from here on is what the cache holds.
    return answer(case, replace(answered.problem, kv_cache=case.kv_cache))


def _forward(target: Target, answered: Answered, impl: Any, metadata: Any) -> torch.Tensor:
    case = answered.case
    output = case.new_output()
    includes = target.backend.forward_includes_kv_cache_update and case.writes_cache
    cache_watch = watch_cache(case, may_write=includes) if case.kv_cache.numel() else None
    output_watch = watch_output(case, output)
    with PoisonedAllocations():
        result = impl.forward(
            case.layer, case.query, case.key, case.value, case.kv_cache, metadata, output
        )
    if found := output_watch.complaint():
        raise NonConformanceError(f"forward wrote outside its output rows: {found}")
    if cache_watch and (found := cache_watch.complaint()):
        raise NonConformanceError(f"forward wrote to the cache: {found}")
    if result is not None and result.data_ptr() != output.data_ptr():
        raise NonConformanceError("forward returned another tensor than the output it was given")
    if includes:
        check_written(answered)
    return output


def _forward_with_lse(target: Target, answered: Answered, impl: Any, metadata: Any) -> None:
    case = answered.case
    output = case.new_output()
    output_watch = watch_output(case, output)
    with PoisonedAllocations():
        _, lse = impl.forward_with_lse(
            case.layer, case.query, case.key, case.value, case.kv_cache, metadata, output
        )
    if found := output_watch.complaint():
        raise NonConformanceError(f"forward_with_lse wrote outside its output rows: {found}")
    exact, budget = answered.exact, answered.budget
    judge_output(case, output, answered.problem, exact, budget, "forward_with_lse")
    judge_log_sum_exp(case, lse, impl.lse_base_on_e, exact, budget)


def check_refusal(target: Target, scenario: Scenario) -> None:
    """Force a scenario that selection refuses into the impl: it must refuse, before any write.

    Raises:
        NonConformanceError: it ran, it wrote first, or it raised something else than ValueError.
    """
    spec = spec_of(scenario, target.backend)
    case = make_case(scenario, spec, target.device)
    output = case.new_output()
    nothing = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    watches = [watch_cache(case, may_write=False)] if case.kv_cache.numel() else []
    watches.append(Watch.of("output", output, nothing))
    refused: Exception | None = None
    try:
        for step in _forced_steps(target, case, output):
            step()
    except ValueError as error:
        refused = error
    except Exception as error:
        raise NonConformanceError(
            f"selection declines it, but the impl raises {type(error).__name__} instead of "
            f"ValueError: {_first_line(error)}"
        ) from error
    if refused is None:
        raise NonConformanceError(
            "selection declines it, yet the impl runs it without an error",
            likely="what the backend does not have is dropped in silence",
        )
    for watch in watches:
        if found := watch.complaint():
            raise NonConformanceError(f"refused only after it had written: {found}")


def _forced_steps(
    target: Target, case: Case, output: torch.Tensor
) -> Iterator[Callable[[], object]]:
    """Yield what an engine would do, a step at a time; any of them may refuse."""
    made: dict[str, Any] = {}

    def construct() -> None:
        made["builder"] = make_builder(target.backend, case.scenario, target.device, target.options)
        made["impl"] = impl_for(target, case)

    yield construct
    yield lambda: made.update(metadata=build(made["builder"], case))
    if not target.backend.forward_includes_kv_cache_update and case.writes_cache:
        yield lambda: made["impl"].do_kv_cache_update(
            case.layer, case.key, case.value, case.kv_cache, case.metadata.slot_mapping
        )
    yield lambda: made["impl"].forward(
        case.layer, case.query, case.key, case.value, case.kv_cache, made["metadata"], output
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _end_of_traceback(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(lines[-8:])
