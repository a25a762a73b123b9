"""Which scenarios a backend is run on: every feature alone in every phase, and every pair.

A scenario is found again by backend, seed and name: every draw depends on these only, not on what
was drawn before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from attnmux.testing.batches import draw_requests
from attnmux.testing.declared import Declared
from attnmux.testing.features import (
    KV_SHARING,
    MASKS_AND_SCORES,
    PER_HEAD_SCALES,
    TYPES,
    VALUE_SIZE,
    Feature,
    cache_feature,
)
from attnmux.testing.memory import MEMORY_TOPICS
from attnmux.testing.paged_read import KNOWN_CACHE_DTYPES
from attnmux.testing.scenario import PHASES, Scenario, with_topics

LEVELS = ("quick", "full")
# Heads of query and cache: grouped, equal, one KV head, groups and counts that are no power of two.
_HEADS = ((4, 2), (4, 4), (4, 1), (6, 2), (6, 3))
# Storage that is no arithmetic of its own, and a second name of fp8_e4m3.
_QUICK_UNPAIRED = {"cache_float32", "cache_float16", "cache_bfloat16", "cache_fp8"}
_QUICK_CACHE_PHASES = ("mixed", "decode")


@dataclass(frozen=True)
class Recipe:
    """How to draw one scenario; a second attempt draws others of the same name."""

    name: str
    seed: int
    draw: Callable[[Random], Scenario]

    def scenario(self, attempt: int = 0) -> Scenario:
        """Draw it. The same name, seed and attempt give the same scenario everywhere."""
        drawn = self.draw(Random(f"{self.seed}:{self.name}:{attempt}"))
        # One number for the tensors, so that attempts differ in these too.
        return replace(drawn, name=self.name, seed=self.seed * 1000 + attempt)


def recipes(declared: Declared, seed: int = 0, level: str = "quick") -> list[Recipe]:
    """Return every recipe for a backend that declares this, in the order of the report."""
    return list(_recipes(declared, seed, level))


def plain_scenario(declared: Declared, phase: str, random: Random, seed: int) -> Scenario:
    """Draw a scenario without features, in the first dtype, with plain memory."""
    drawn = _base(declared, phase, random)
    return replace(
        drawn,
        seed=seed * 1000,
        dtype=declared.dtypes[0],
        strides="contiguous",
        flat=False,
        pad_tokens=0,
        poison="nan",
    )


def features_for(declared: Declared) -> tuple[Feature, ...]:
    """Return every feature, with one for each cache dtype that the kit can judge."""
    caches = tuple(cache_feature(name) for name in KNOWN_CACHE_DTYPES if name != "auto")
    return (*MASKS_AND_SCORES, *TYPES, *caches, PER_HEAD_SCALES, KV_SHARING, VALUE_SIZE)


def _recipes(declared: Declared, seed: int, level: str) -> Iterator[Recipe]:
    for phase in PHASES:
        yield _feature_recipe(declared, seed, phase, ())
    features = features_for(declared)
    for feature in features:
        shown = [phase for phase in PHASES if phase in feature.phases]
        if level == "quick" and feature.family == "cache":
            shown = [phase for phase in _QUICK_CACHE_PHASES if phase in shown]
        for phase in shown:
            yield _feature_recipe(declared, seed, phase, (feature,))
    for first, second in itertools.combinations(features, 2):
        common = [p for p in (*PHASES[::-1],) if p in first.phases and p in second.phases]
        paired = level == "full" or not {first.name, second.name} & _QUICK_UNPAIRED
        if common and paired and first.goes_with(second):
            for phase in common if level == "full" else common[:1]:
                yield _feature_recipe(declared, seed, phase, (first, second))
    yield from _shape_recipes(declared, seed, level)
    for topic in MEMORY_TOPICS:
        for phase in topic.phases if level == "full" else topic.phases[:1]:
            yield _recipe(declared, seed, f"{phase}.{topic.name}", phase, topic.title, topic.apply)


def _feature_recipe(
    declared: Declared, seed: int, phase: str, features: tuple[Feature, ...]
) -> Recipe:
    names = "+".join(feature.name for feature in features) or "plain"

    def draw(random: Random) -> Scenario:
        scenario = _base(declared, phase, random)
        for feature in sorted(features, key=lambda feature: feature.family != "type"):
            scenario = feature.apply(scenario, random)
        return with_topics(scenario, [feature.title for feature in features] or ["plain attention"])

    return Recipe(f"{phase}.{names}", seed, draw)


def _shape_recipes(declared: Declared, seed: int, level: str) -> Iterator[Recipe]:
    few = None if level == "full" else 4
    for size in declared.head_sizes[:few]:
        yield _fixed(declared, seed, "mixed", f"head_size_{size}", "head sizes", head_size=size)
    for size in declared.block_sizes[:few]:
        yield _fixed(declared, seed, "mixed", f"block_size_{size}", "block sizes", block_size=size)
    for name in declared.layouts:
        yield _fixed(declared, seed, "mixed", f"layout_{name}", "cache layouts", layout=name)
    for name in declared.dtypes:
        yield _fixed(declared, seed, "mixed", f"dtype_{name}", "dtypes", dtype=name)
    for label, title, field, value in declared.undeclared:
        yield _fixed(declared, seed, "mixed", label, title, **{field: value})
    for heads, kv_heads in _HEADS:
        yield _fixed(
            declared,
            seed,
            "mixed",
            f"heads_{heads}_{kv_heads}",
            "head counts",
            num_heads=heads,
            num_kv_heads=kv_heads,
        )


def _fixed(
    declared: Declared, seed: int, phase: str, label: str, title: str, **values: object
) -> Recipe:
    def apply(scenario: Scenario, random: Random) -> Scenario:
        changed = replace(scenario, **values)  # type: ignore[arg-type]
        return replace(changed, requests=draw_requests(phase, changed.block_size, random))

    return _recipe(declared, seed, f"{phase}.{label}", phase, title, apply)


def _recipe(
    declared: Declared,
    seed: int,
    name: str,
    phase: str,
    title: str,
    apply: Callable[[Scenario, Random], Scenario],
) -> Recipe:
    def draw(random: Random) -> Scenario:
        return with_topics(apply(_base(declared, phase, random), random), [title])

    return Recipe(name, seed, draw)


def _base(declared: Declared, phase: str, random: Random) -> Scenario:
    """Draw what every scenario has: sizes, dtype, layout, batch, poison."""
    num_heads, num_kv_heads = random.choice(_HEADS)
    block_size = random.choice(declared.block_sizes[:3])
    return Scenario(
        name="",
        seed=0,
        phase=phase,
        topics=(),
        requests=draw_requests(phase, block_size, random),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=random.choice(declared.head_sizes[:2]),
        dtype=random.choice(declared.dtypes),
        block_size=block_size,
        layout=random.choice(declared.layouts),
        poison=random.choice(("nan", "nan", "finite")),
        table_tail=random.choice(("huge", "poisoned")),
        strides=random.choice(("contiguous", "fused")),
        pad_tokens=random.choice((0, 3)),
        flat=random.random() < 0.3,
    )
