"""Verification of backends that answer badly, or that the kit has no reference for."""

from __future__ import annotations

import pytest
import torch

from attnmux.testing import State, Target, outcome_of, outcomes, verify
from attnmux.testing.sabotage import ToyBackend
from attnmux.testing.verification import scenario_names


def _toy(**members):
    return type("Odd", (ToyBackend,), members)


def _raise(*arguments):
    raise RuntimeError("no such chip")


@pytest.mark.parametrize(
    ("members", "state", "says"),
    [
        ({"supports_sink": classmethod(_raise)}, State.FAILED, "RuntimeError: no such chip"),
        ({"supported_kv_cache_layouts": classmethod(_raise)}, State.FAILED, "no such chip"),
        ({"is_mla": classmethod(_raise)}, State.FAILED, "no such chip"),
        ({"supports_sink": classmethod(lambda cls: "yes")}, State.FAILED, "answers 'yes'"),
        ({"is_ssm": classmethod(lambda cls: True)}, State.NOT_RUN, "state-space"),
        ({"supported_dtypes": [torch.float64]}, State.NOT_RUN, "declares no dtypes"),
    ],
)
def test_bad_answers_end_the_run_with_one_outcome(members, state: State, says: str) -> None:
    target = Target(_toy(**members))
    (outcome,) = outcomes(target)
    assert outcome.state is state
    assert says in f"{outcome.failure} {outcome.reasons}"
    assert scenario_names(target) == ("declarations",)


def test_undeclared_sizes_must_be_refused() -> None:
    picky = _toy(supports_head_size=classmethod(lambda cls, size: size != 40))
    failure = outcome_of(Target(picky), "mixed.head_size_40").failure
    assert failure is not None
    assert "selection declines it, yet the impl runs it" in failure.what


def test_cache_dtype_without_a_reference_is_not_run() -> None:
    odd = _toy(supported_kv_cache_dtypes=["auto", "nvfp4"])
    outcome = outcome_of(Target(odd), "round_trip.cache_nvfp4")
    assert outcome.state is State.NOT_RUN


def test_backend_that_breaks_only_on_odd_blocks_is_found() -> None:
    class Impl(ToyBackend.get_impl_cls()):
        def attend(self, problem):
            assert problem.kv_cache is None or problem.kv_cache.shape[2] % 16 == 0
            return super().attend(problem)

    odd = _toy(get_impl_cls=staticmethod(lambda: Impl))
    failure = outcome_of(Target(odd), "mixed.block_size_12").failure
    assert failure is not None
    assert "raised AssertionError" in failure.what
    assert "attend" in failure.trace


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"backend": "NO_SUCH"}, "backend: got 'NO_SUCH'"),
        ({"backend": ToyBackend, "level": "slow"}, "level: got 'slow'"),
        ({"backend": ToyBackend, "device": "cuda:99"}, "device: got cuda:99"),
    ],
)
def test_bad_arguments_are_errors(arguments, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        verify(**arguments)


@pytest.mark.parametrize("name", ["decode.sinkz", "xyzzy"])
def test_a_scenario_that_does_not_exist_is_answered_with_some_that_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"scenario: got '{name}'; .* such as [a-z]"):
        outcome_of(Target(ToyBackend), name)


def test_backend_whose_forward_writes_the_cache_is_judged_too() -> None:
    class Impl(ToyBackend.get_impl_cls()):
        def problem(self, layer, query, key, value, kv_cache, metadata):
            # Asked for after everything was checked.
            if key is not None and kv_cache.numel():
                slots = metadata.batch.slot_mapping
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
            return super().problem(layer, query, key, value, kv_cache, metadata)

    members = {
        "get_impl_cls": staticmethod(lambda: Impl),
        "forward_includes_kv_cache_update": True,
    }
    right = Target(_toy(**members))
    names = [name for name in scenario_names(right) if "+" not in name]
    failures = [str(o.failure) for name in names if (o := outcome_of(right, name)).failure]
    assert failures == []

    # The same, but nothing is written: the step's own keys are missing.
    wrong = Target(_toy(forward_includes_kv_cache_update=True))
    failure = outcome_of(wrong, "prefill.plain").failure
    assert failure is not None
    assert "reads back as" in failure.what


def test_builder_that_wants_decodes_first_gets_them_first() -> None:
    from attnmux.testing.sabotage.toy import ToyBuilder

    class Builder(ToyBuilder):
        reorder_batch_threshold = 2

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            lens = common_attn_metadata.query_start_loc_cpu.diff()
            few = (lens <= self.reorder_batch_threshold) & (lens > 0)
            assert bool((few[:-1] >= few[1:]).all()), f"decodes are not first: {lens.tolist()}"
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    target = Target(_toy(get_builder_cls=staticmethod(lambda: Builder)))
    for name in ("mixed.plain", "mixed.mm_prefix", "mixed.per_request_causal+rswa"):
        outcome = outcome_of(target, name)
        assert outcome.state is State.PROVED, str(outcome.failure)
