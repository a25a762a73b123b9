"""Scenarios: the same everywhere, all of them visible, pairs of everything that goes together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from attnmux.testing.behaviours import behaviours
from attnmux.testing.case import make_case
from attnmux.testing.declared import Declared
from attnmux.testing.features import MASKS_AND_SCORES
from attnmux.testing.generate import features_for, recipes
from attnmux.testing.kit import Target, answer, make_builder, run_case
from attnmux.testing.outcome import State
from attnmux.testing.road import spec_of
from attnmux.testing.sabotage import ToyBackend
from attnmux.testing.scenario import Request, Scenario
from attnmux.testing.strategies import scenarios
from attnmux.testing.variants import invisible_variant, variants_of

DECLARED = Declared.by(ToyBackend)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_names_are_unique(level: str) -> None:
    names = [recipe.name for recipe in recipes(DECLARED, 0, level)]
    names += [behaviour.name for behaviour in behaviours(DECLARED)]
    assert len(names) == len(set(names))


def test_every_quick_scenario_is_found_among_the_full_ones() -> None:
    full = {recipe.name for recipe in recipes(DECLARED, 0, "full")}
    assert {recipe.name for recipe in recipes(DECLARED, 0, "quick")} <= full


def test_scenario_depends_on_name_and_seed_only() -> None:
    wanted = "mixed.sliding_window+sinks"
    quick, full = (
        next(recipe for recipe in recipes(DECLARED, 7, level) if recipe.name == wanted)
        for level in ("quick", "full")
    )
    assert quick.scenario() == full.scenario()
    other = next(recipe for recipe in recipes(DECLARED, 8, "quick") if recipe.name == wanted)
    assert other.scenario() != quick.scenario()


def test_every_feature_is_drawn_alone_and_every_pair_that_goes_together() -> None:
    names = {recipe.name for recipe in recipes(DECLARED, 0, "full")}
    features = features_for(DECLARED)
    for feature in features:
        assert {f"{phase}.{feature.name}" for phase in feature.phases} <= names
    for i, first in enumerate(features):
        for second in features[i + 1 :]:
            common = set(first.phases) & set(second.phases)
            pair = {f"{phase}.{first.name}+{second.name}" for phase in common}
            assert bool(pair & names) is (bool(common) and first.goes_with(second))


def test_pairs_that_failed_in_the_field_are_drawn() -> None:
    names = {recipe.name.partition(".")[2] for recipe in recipes(DECLARED, 0, "quick")}
    assert {
        "soft_cap+sinks",
        "alibi+sinks",
        "soft_cap+alibi",
        "sliding_window+cache_fp8_e4m3",
        "sliding_window+encoder_only",
        "sliding_window+mm_prefix",
        "sliding_window+sinks",
    } <= names


def test_window_scenario_without_a_visible_window_is_thrown_away() -> None:
    recipe = next(r for r in recipes(DECLARED, 0) if r.name == "decode.sliding_window")
    short = replace(recipe.scenario(), requests=(Request(1, 2), Request(1, 1)), sliding_window=3)
    answered = answer(make_case(short, spec_of(short, ToyBackend)))
    hidden = invisible_variant(answered.problem, answered.exact, answered.budget)
    assert hidden is not None
    assert "window" in hidden.kind


@pytest.mark.parametrize("feature", MASKS_AND_SCORES, ids=lambda feature: feature.name)
def test_feature_has_a_mistake_that_must_show(feature) -> None:
    phase = feature.phases[-1]
    name = f"{phase}.{feature.name}"
    scenario = next(r for r in recipes(DECLARED, 0, "full") if r.name == name).scenario()
    plain = next(r for r in recipes(DECLARED, 0, "full") if r.name == f"{phase}.plain").scenario()
    kinds, usual = (
        {v.kind for v in variants_of(_problem(s)) if v.must_show} for s in (scenario, plain)
    )
    assert kinds - usual


def _problem(scenario: Scenario):
    return make_case(scenario, spec_of(scenario, ToyBackend)).problem


def test_sinks_are_near_the_largest_scores_of_their_rows() -> None:
    name = "decode.sinks"
    scenario = next(r for r in recipes(DECLARED, 0, "full") if r.name == name).scenario()
    case = make_case(scenario, spec_of(scenario, ToyBackend))
    without = answer(case, replace(case.problem, sinks=None)).exact.lse
    with_sink = answer(case).exact.lse
    moved = (with_sink - without)[without.isfinite()]
    assert moved.max() > 0.1


def test_unused_memory_is_poisoned_and_the_history_is_not() -> None:
    name = "mixed.nan_tails"
    scenario = next(r for r in recipes(DECLARED, 0, "full") if r.name == name).scenario()
    case = make_case(scenario, spec_of(scenario, ToyBackend))
    nan_rows = case.kv_cache.float().isnan().all(dim=-1).all(dim=1)  # [num_blocks, block_size]
    history = sum(request.seq_len - request.query_len for request in scenario.requests)
    assert int((~nan_rows).sum()) == history
    assert nan_rows[0].all()


@given(scenario=scenarios(DECLARED))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_right_backend_is_right_on_any_scenario(scenario: Scenario) -> None:
    target = Target(ToyBackend)
    case = make_case(scenario, spec_of(scenario, ToyBackend))
    builder = make_builder(ToyBackend, scenario, "cpu")
    assert run_case(target, answer(case), builder)[0] is State.PROVED
