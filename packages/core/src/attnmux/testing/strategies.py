"""Hypothesis strategies of batches and scenarios, for property tests of backends and of the kit.

Needs hypothesis (`pip install attnmux[testing]`); nothing else of the kit imports this module.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from attnmux.testing.declared import Declared
from attnmux.testing.features import Feature
from attnmux.testing.generate import features_for
from attnmux.testing.scenario import Request, Scenario, with_topics

_MOST_FEATURES = 3


def requests(
    *, max_query_len: int = 20, max_context: int = 40, max_requests: int = 5
) -> st.SearchStrategy[tuple[Request, ...]]:
    """Draw a batch: any mix of prefills, extends, decodes and empty places."""
    lengths = st.tuples(st.integers(0, max_query_len), st.integers(0, max_context))
    one = lengths.map(lambda pair: Request(pair[0], pair[0] + pair[1]))
    return st.lists(one, min_size=1, max_size=max_requests).map(tuple)


def feature_sets(declared: Declared) -> st.SearchStrategy[tuple[Feature, ...]]:
    """Draw up to three features that go together."""
    chosen = st.lists(
        st.sampled_from(features_for(declared)),
        max_size=_MOST_FEATURES,
        unique_by=lambda feature: feature.name,
    )
    return chosen.map(_compatible)


@st.composite
def scenarios(draw: st.DrawFn, declared: Declared) -> Scenario:
    """Draw a scenario for a backend that declares this.

    Nothing is promised about what its features change: a window may be longer than every request.
    Scenarios that must show their features come from `attnmux.testing.generate`.
    """
    features = draw(feature_sets(declared))
    block_size = draw(st.sampled_from(declared.block_sizes[:4]))
    num_kv_heads = draw(st.integers(1, 3))
    scenario = Scenario(
        name="drawn",
        seed=draw(st.integers(0, 2**16)),
        phase="mixed",
        topics=(),
        requests=draw(requests()),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.sampled_from(declared.head_sizes[:3])),
        dtype=draw(st.sampled_from(declared.dtypes)),
        block_size=block_size,
        layout=draw(st.sampled_from(declared.layouts)),
        pad_requests=draw(st.integers(0, 2)),
        pad_tokens=draw(st.integers(0, 3)),
        extra_rows=draw(st.integers(0, 2)),
        strides=draw(st.sampled_from(("contiguous", "fused", "transposed"))),
        poison=draw(st.sampled_from(("nan", "finite"))),
        table_tail=draw(st.sampled_from(("huge", "poisoned"))),
    )
    random = Random(draw(st.integers(0, 2**16)))
    for feature in features:
        scenario = feature.apply(scenario, random)
    if scenario.is_cross and not scenario.cacheless:
        # All of the encoder's tokens come with this step.
        scenario = replace(scenario, phase="prefill")
    return with_topics(scenario, [feature.title for feature in features])


def _compatible(features: list[Feature]) -> tuple[Feature, ...]:
    kept: list[Feature] = []
    for feature in features:
        if all(feature.goes_with(other) for other in kept):
            kept.append(feature)
    # The type decides what the others may look at, so it goes first.
    return tuple(sorted(kept, key=lambda feature: feature.family != "type"))
