"""The features that scenarios are made of: how each is switched on, and what excludes what.

A feature is a function from a scenario to a scenario. It says nothing about backends: whether a
backend has it is asked of the backend, with the request that the scenario makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from attnmux.testing.scenario import Request, Scenario

Apply = Callable[[Scenario, Random], Scenario]
WITH_CONTEXT = ("prefill", "extend", "decode", "mixed")
SEVERAL_TOKENS = ("prefill", "extend", "mixed")
"""Phases in which a request has several queries: elsewhere nothing can look ahead."""


@dataclass(frozen=True)
class Feature:
    """One row of the report.

    Attributes:
        name: as in scenario names; ``family`` members exclude each other.
        title: what the row is called.
        apply: switches it on.
        phases: where its effect can be seen.
        excludes: names of features and families that it cannot be drawn with.
        family: features of which a scenario has at most one.
    """

    name: str
    title: str
    apply: Apply
    phases: tuple[str, ...] = WITH_CONTEXT
    excludes: frozenset[str] = frozenset()
    family: str = ""

    def goes_with(self, other: Feature) -> bool:
        """Whether a scenario may have both."""
        if self.name == other.name or (self.family and self.family == other.family):
            return False
        names = {self.name, self.family}, {other.name, other.family}
        return not (self.excludes & names[1] or other.excludes & names[0])


def _window(scenario: Scenario, random: Random) -> Scenario:
    longest = max(scenario.num_keys(request) for request in scenario.requests)
    block = scenario.block_size
    # On and beside the edge of a block, far inside it, and the smallest with a neighbour.
    choices = [w for w in (2, 3, 5, block - 1, block, block + 1) if 1 < w < longest] or [1]
    forget = scenario.uses_cache and random.random() < 0.5
    return replace(scenario, sliding_window=random.choice(choices), forget_unseen=forget)


def _soft_cap(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, logits_soft_cap=random.choice([2.0, 3.5]), size=2.5)


def _alibi(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, alibi="linear")


def _alibi_sqrt(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, alibi="sqrt")


def _sinks(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, sinks=True)


def _non_causal(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, causal=False)


def _per_request_causal(scenario: Scenario, random: Random) -> Scenario:
    # Both answers occur among the requests that have something to look ahead to.
    first = random.randrange(2)
    several = [request for request in scenario.requests if request.query_len > 1]
    flags = {id(request): (i + first) % 2 == 0 for i, request in enumerate(several)}
    requests = (
        replace(request, causal=flags.get(id(request), random.random() < 0.5))
        for request in scenario.requests
    )
    return replace(scenario, per_request_causal=True, requests=tuple(requests))


def _mm_prefix(scenario: Scenario, random: Random) -> Scenario:
    def with_ranges(request: Request) -> Request:
        if request.query_len < 2 or request.seq_len < 4:
            return request
        first_query = request.seq_len - request.query_len
        # The first range ends behind the first queries, so that these look ahead; a second one
        # follows where there is room.
        end = random.randint(first_query + 1, request.seq_len - 1)
        start = random.randint(max(0, first_query - 6), end - 1)
        ranges = [(start, end)]
        if end + 3 < request.seq_len:
            ranges.append((end + 2, random.randint(end + 3, request.seq_len - 1)))
        return replace(request, ranges=tuple(ranges))

    return replace(scenario, requests=tuple(map(with_ranges, scenario.requests)))


def _rswa(scenario: Scenario, random: Random) -> Scenario:
    def with_prefix(request: Request) -> Request:
        return replace(request, rswa_prefix=random.randint(0, max(0, request.seq_len // 3)))

    requests = tuple(map(with_prefix, scenario.requests))
    return replace(scenario, rswa_window=random.choice([2, 3, 4]), requests=requests)


def _as_encoder(kind: str) -> Apply:
    def apply(scenario: Scenario, random: Random) -> Scenario:
        requests = (replace(r, seq_len=r.query_len) for r in scenario.requests)
        return replace(scenario, attn_type=kind, requests=tuple(requests))

    return apply


def _as_cross(cacheless: bool) -> Apply:
    def apply(scenario: Scenario, random: Random) -> Scenario:
        block = min(scenario.block_size, 16)
        # 0 keys, one, and both sides of a block's edge; no relation to the decoder's lengths.
        lengths = [0, 1, block, block + 1, 2 * block + 3, 7]
        random.shuffle(lengths)
        requests = (
            replace(r, encoder_len=lengths[i % len(lengths)])
            for i, r in enumerate(scenario.requests)
        )
        return replace(
            scenario, attn_type="encoder_decoder", cacheless=cacheless, requests=tuple(requests)
        )

    return apply


def _with_cache_dtype(name: str) -> Apply:
    def apply(scenario: Scenario, random: Random) -> Scenario:
        return replace(scenario, kv_cache_dtype=name)

    return apply


def _per_head_scales(scenario: Scenario, random: Random) -> Scenario:
    if scenario.num_kv_heads == 1:
        scenario = replace(scenario, num_heads=6, num_kv_heads=3)
    return replace(scenario, kv_cache_dtype="fp8_e4m3", per_head_scales=True)


def _kv_sharing(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, kv_sharing=True)


_LOOK_AHEAD = frozenset({"non_causal", "per_request_causal", "mm_prefix", "rswa"})
_NO_CACHE = _LOOK_AHEAD | {"cache", "kv_sharing"}
_ENCODER_PHASES = ("prefill",)

MASKS_AND_SCORES = (
    Feature("sliding_window", "sliding window", _window),
    Feature("soft_cap", "logits soft cap", _soft_cap),
    Feature("alibi", "ALiBi", _alibi, family="alibi"),
    Feature("alibi_sqrt", "ALiBi, square root", _alibi_sqrt, family="alibi"),
    Feature("sinks", "attention sinks", _sinks),
    Feature("non_causal", "non-causal decoder", _non_causal, SEVERAL_TOKENS, family="causality"),
    Feature(
        "per_request_causal",
        "causal per request",
        _per_request_causal,
        SEVERAL_TOKENS,
        family="causality",
    ),
    # Where all look ahead anyway, ranges change nothing.
    Feature(
        "mm_prefix",
        "multimodal prefix ranges",
        _mm_prefix,
        SEVERAL_TOKENS,
        frozenset({"non_causal", "alibi_sqrt"}),
    ),
    Feature("rswa", "reference sliding window", _rswa),
)

TYPES = (
    Feature(
        "encoder_only",
        "encoder-only attention",
        _as_encoder("encoder_only"),
        _ENCODER_PHASES,
        _NO_CACHE,
        "type",
    ),
    Feature(
        "encoder", "encoder attention", _as_encoder("encoder"), _ENCODER_PHASES, _NO_CACHE, "type"
    ),
    Feature(
        "cross",
        "cross attention, cached",
        _as_cross(cacheless=False),
        ("prefill", "decode"),
        _LOOK_AHEAD | {"sliding_window", "alibi", "kv_sharing"},
        "type",
    ),
    Feature(
        "cross_cacheless",
        "cross attention, no cache",
        _as_cross(cacheless=True),
        ("prefill", "decode"),
        _NO_CACHE | {"sliding_window", "alibi"},
        "type",
    ),
)


def _narrow_values(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, head_size_v=scenario.head_size // 2)


VALUE_SIZE = Feature("value_size", "value heads of another size", _narrow_values)
KV_SHARING = Feature("kv_sharing", "KV sharing", _kv_sharing)
PER_HEAD_SCALES = Feature(
    "per_head_scales", "cache scale per KV head", _per_head_scales, family="cache"
)


def cache_feature(name: str) -> Feature:
    """Return the feature of a cache dtype."""
    return Feature(f"cache_{name}", f"cache {name}", _with_cache_dtype(name), family="cache")
