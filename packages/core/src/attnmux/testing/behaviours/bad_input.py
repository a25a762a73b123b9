"""Bad input is a ValueError that names the argument, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnmux.testing.behaviours.behaviour import PROVED, Behaviour, Tried, draw, prepare
from attnmux.testing.case import Case
from attnmux.testing.declared import Declared
from attnmux.testing.kit import Target, build, impl_for
from attnmux.testing.outcome import NonConformanceError, State
from attnmux.testing.poison import Watch
from attnmux.testing.road import make_impl, reasons_against, request_of
from attnmux.testing.scenario import Scenario


@dataclass(frozen=True)
class _BadLayer:
    """An impl that must not be made."""

    name: str
    named: str  # what the error must name
    change: Callable[[Scenario], Scenario]
    given: Callable[[Scenario], dict[str, Any]] = lambda scenario: {}
    needs: Callable[[Scenario], Scenario] | None = None  # a feature that the backend must have

    def attempt(self, target: Target, declared: Declared, seed: int) -> Tried:
        """Make it, and expect the error."""
        scenario = draw(declared, "mixed", seed, self.name)
        if self.needs is not None:
            request = request_of(self.needs(scenario), target.device)
            if reasons := reasons_against(target.backend, request):
                return State.DECLINED, tuple(str(reason) for reason in reasons)
        bad = self.change(scenario)
        arguments: dict[str, Any] = {
            "scale": 1.0,
            "alibi_slopes": None,
            "sinks": None,
            "options": target.options,
        }
        arguments.update(self.given(bad))
        _expect_error(self.named, lambda: make_impl(target.backend, bad, **arguments))
        return PROVED


@dataclass(frozen=True)
class _BadCall:
    """A call with one wrong argument."""

    name: str
    named: str
    method: str  # "forward" or "do_kv_cache_update"
    change: Callable[[Case, dict[str, Any]], dict[str, Any]]

    def attempt(self, target: Target, declared: Declared, seed: int) -> Tried:
        """Call it, expect the error, and that nothing was written."""
        if self.method == "do_kv_cache_update" and target.backend.forward_includes_kv_cache_update:
            return State.DECLINED, ("forward writes the cache",)
        scenario = replace(draw(declared, "mixed", seed, self.name), num_heads=4, num_kv_heads=2)
        case, builder = prepare(target, scenario)
        impl = impl_for(target, case)
        arguments: dict[str, Any] = {
            "layer": case.layer,
            "key": case.key,
            "value": case.value,
            "kv_cache": case.kv_cache,
        }
        if self.method == "forward":
            arguments.update(
                query=case.query, attn_metadata=build(builder, case), output=case.new_output()
            )
        else:
            arguments["slot_mapping"] = case.metadata.slot_mapping
        arguments.update(self.change(case, arguments))
        watches = [Watch.of("kv_cache", case.kv_cache)]
        if "output" in arguments:
            watches.append(Watch.of("output", arguments["output"]))
        _expect_error(self.named, lambda: getattr(impl, self.method)(**arguments))
        for watch in watches:
            if found := watch.complaint():
                raise NonConformanceError(f"refused only after it had written: {found}")
        return PROVED


def _expect_error(named: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError as error:
        if not any(name in str(error) for name in named.split("|")):
            raise NonConformanceError(
                f"the error does not name {named.replace('|', ' or ')}: {error}"
            ) from error
        return
    except Exception as error:
        raise NonConformanceError(
            f"raised {type(error).__name__} instead of a ValueError that names "
            f"{named.replace('|', ' or ')}: {error}"
        ) from error
    raise NonConformanceError(f"a bad {named.replace('|', ' or ')} was accepted")


def _with_window(window: int) -> Callable[[Scenario], Scenario]:
    return lambda scenario: replace(scenario, sliding_window=window)


def _with_alibi(scenario: Scenario) -> Scenario:
    return replace(scenario, alibi="linear")


def _with_sinks(scenario: Scenario) -> Scenario:
    return replace(scenario, sinks=True)


def _as_cross(scenario: Scenario) -> Scenario:
    return replace(scenario, attn_type="encoder_decoder")


_LAYERS = (
    _BadLayer("window_zero", "sliding_window", _with_window(0), needs=_with_window(1)),
    _BadLayer("window_negative", "sliding_window", _with_window(-1), needs=_with_window(1)),
    _BadLayer(
        "heads_do_not_divide",
        "num_heads|num_kv_heads",
        lambda scenario: replace(scenario, num_heads=3, num_kv_heads=2),
    ),
    _BadLayer(
        "too_few_slopes",
        "alibi_slopes",
        _with_alibi,
        lambda scenario: {"alibi_slopes": [0.5] * (scenario.num_heads - 1)},
        needs=_with_alibi,
    ),
    _BadLayer(
        "too_many_sinks",
        "sinks",
        _with_sinks,
        lambda scenario: {"sinks": torch.zeros(scenario.num_heads + 1)},
        needs=_with_sinks,
    ),
    _BadLayer(
        "cross_with_window",
        "sliding_window|attn_type",
        lambda scenario: replace(_as_cross(scenario), sliding_window=4),
        needs=_as_cross,
    ),
    _BadLayer(
        "cross_with_alibi",
        "alibi|attn_type",
        _as_cross,
        lambda scenario: {"alibi_slopes": [0.5] * scenario.num_heads},
        needs=_as_cross,
    ),
)

_CALLS = (
    _BadCall(
        "query_head_size", "query", "forward", lambda case, args: {"query": args["query"][..., :-1]}
    ),
    _BadCall("query_dtype", "query", "forward", lambda case, args: {"query": case.query.int()}),
    _BadCall("query_too_short", "query", "forward", lambda case, args: {"query": case.query[:1]}),
    _BadCall(
        "output_dtype",
        "output",
        "forward",
        lambda case, args: {"output": torch.zeros_like(args["output"], dtype=torch.int32)},
    ),
    _BadCall(
        "output_too_short", "output", "forward", lambda case, args: {"output": args["output"][:1]}
    ),
    _BadCall(
        "cache_heads", "kv_cache", "forward", lambda case, args: {"kv_cache": case.kv_cache[:, :1]}
    ),
    _BadCall(
        "key_heads",
        "key",
        "do_kv_cache_update",
        lambda case, args: {"key": args["key"][:, :1]},
    ),
    _BadCall(
        "key_dtype",
        "key",
        "do_kv_cache_update",
        lambda case, args: {"key": torch.zeros_like(args["key"], dtype=torch.int32)},
    ),
    _BadCall(
        "slots_dtype",
        "slot_mapping",
        "do_kv_cache_update",
        lambda case, args: {"slot_mapping": args["slot_mapping"].float()},
    ),
)

BEHAVIOURS = tuple(
    Behaviour(f"bad_input.{bad.name}", "bad input", bad.attempt) for bad in (*_LAYERS, *_CALLS)
)
