"""The kit's own proof: the right toy passes, each broken one is caught for its reason."""

from __future__ import annotations

import pytest

from attnmux.checks import bad_argument
from attnmux.testing import State, Target, outcome_of, outcomes
from attnmux.testing.sabotage import SABOTAGES, Sabotage, ToyBackend
from attnmux.testing.sabotage.toy import ToyImpl
from attnmux.testing.verification import scenario_names

KINDS_ASKED_FOR = {
    # What the project promises to catch, by the names of the sabotages.
    "window_one_more",
    "window_one_less",
    "sink_dropped",
    "sink_twice",
    "nan_leak",
    "lse_base_2",
    "reads_past_table",
    "int32_blocks",
    "int32_rows",
    "key_scale_lost",
    "value_scale_lost",
    "soft_cap_dropped",
    "alibi_dropped",
    "ranges_ignored",
    "reads_block_zero",
    "writes_past_end",
    "metadata_changed",
    "slot_minus_one",
    "top_left_causal",
    "declines_and_drops",
}


def test_every_kind_that_is_promised_has_a_sabotage() -> None:
    assert {sabotage.name for sabotage in SABOTAGES} >= KINDS_ASKED_FOR


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.name)
def test_sabotage_is_caught_by_its_scenario_for_its_reason(sabotage: Sabotage) -> None:
    target = Target(sabotage.backend())
    names = [
        name
        for name in scenario_names(target)
        if "+" not in name and any(part in name for part in sabotage.caught_by)
    ]
    assert names, f"no scenario is called {sabotage.caught_by}"
    failures = [outcome.failure for name in names if (outcome := outcome_of(target, name)).failure]
    assert failures, f"{names} let it pass"
    reports = "\n\n".join(map(str, failures))
    assert any(sabotage.says in str(failure) for failure in failures), reports
    assert all("the kit drew" not in str(failure) for failure in failures), reports


def test_right_backend_passes_everything() -> None:
    found = list(outcomes(Target(ToyBackend)))
    assert [str(outcome.failure) for outcome in found if outcome.failure] == []
    proved = sum(outcome.state is State.PROVED for outcome in found)
    assert proved >= 250, "the kit shrank: scenarios were lost"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_right_backend_passes_under_other_seeds(seed: int) -> None:
    target = Target(ToyBackend)
    for name in scenario_names(target)[seed::12]:  # other scenarios for each seed
        outcome = outcome_of(target, name, seed)
        assert outcome.failure is None, str(outcome.failure)


def test_mistakes_of_one_kind_leave_other_features_alone() -> None:
    dropped = next(s for s in SABOTAGES if s.name == "sink_dropped")
    target = Target(dropped.backend())
    assert outcome_of(target, "mixed.sliding_window").state is State.PROVED
    assert outcome_of(target, "mixed.sliding_window+sinks").state is State.FAILED


class _RefusesEarly(ToyImpl):
    def __init__(self, *arguments, sinks=None, alibi_slopes=None, **named) -> None:
        if sinks is not None or alibi_slopes is not None:
            raise bad_argument("sinks, alibi_slopes", "given", "None")
        super().__init__(*arguments, **named)


class _RefusesLate(ToyImpl):
    def problem(self, *arguments, **named):
        if self.sinks is not None or self.alibi_slopes is not None:
            raise bad_argument("sinks, alibi_slopes", "given", "None")
        return super().problem(*arguments, **named)


class _RaisesAssertion(ToyImpl):
    def __init__(self, *arguments, sinks=None, alibi_slopes=None, **named) -> None:
        assert sinks is None
        assert alibi_slopes is None
        super().__init__(*arguments, **named)


DECLINED = {"sinks": "supports_sink", "alibi": "supports_alibi"}


@pytest.mark.parametrize("feature", DECLINED)
@pytest.mark.parametrize(
    ("impl", "state", "says"),
    [
        (_RefusesEarly, State.DECLINED, ""),
        (_RefusesLate, State.FAILED, "refused only after it had written"),
        (_RaisesAssertion, State.FAILED, "raises AssertionError instead of ValueError"),
    ],
)
def test_declined_feature_must_be_refused_before_any_write(
    feature: str, impl: type, state: State, says: str
) -> None:
    refusing = Sabotage("refuses", (), "", impl, declined=(DECLINED[feature],))
    outcome = outcome_of(Target(refusing.backend()), f"mixed.{feature}")
    assert outcome.state is state, str(outcome.failure)
    assert says in str(outcome.failure)
    if state is State.DECLINED:
        assert "not supported" in outcome.reasons[0]
