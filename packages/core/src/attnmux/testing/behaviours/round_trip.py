"""What is written comes back, for values on which conversions go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnmux.testing.behaviours.behaviour import PROVED, Behaviour, Tried, draw
from attnmux.testing.case import copy_with_storage
from attnmux.testing.declared import Declared, dtype_of
from attnmux.testing.kit import Target
from attnmux.testing.outcome import NonConformanceError, State
from attnmux.testing.paged_read import PER_TOKEN_HEAD_CACHE_DTYPES, CacheContent
from attnmux.testing.paged_write import write_complaint, write_rows
from attnmux.testing.poison import poison_
from attnmux.testing.road import (
    Layer,
    allocate_cache,
    make_impl,
    reasons_against,
    request_of,
    spec_of,
)

# Small powers and a value between them (3.5 read as another fp8 format is 6), what saturates, what
# underflows, and signed zeros.
_VALUES = (1.0, 2.0, 3.5, 0.25, 500.0, -500.0, 1e-9, -1e-9, 0.0, -0.0, 447.0, 0.0175)


def behaviours(declared: Declared) -> Iterator[Behaviour]:
    """Yield one for each cache dtype that is declared and that the kit can judge."""
    for name in declared.cache_dtypes:
        yield Behaviour(f"round_trip.cache_{name}", f"cache {name}", _attempt_for(name))
    for name in declared.unknown_cache_dtypes:
        yield Behaviour(f"round_trip.cache_{name}", f"cache {name}", _unknown)


def _unknown(target: Target, declared: Declared, seed: int) -> Tried:
    return State.NOT_RUN, ("the kit has no reference for this cache dtype",)


class _attempt_for:  # noqa: N801 - used as a function that remembers its dtype
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, target: Target, declared: Declared, seed: int) -> Tried:
        """Write special values with two block sizes, read them back."""
        if target.backend.forward_includes_kv_cache_update:
            return State.NOT_RUN, ("forward writes the cache; its scenarios check what it wrote",)
        for block_size in dict.fromkeys((declared.block_sizes[0], declared.block_sizes[-1])):
            scenario = draw(declared, "prefill", seed, "round_trip")
            scenario = replace(scenario, kv_cache_dtype=self.name, block_size=block_size)
            request = request_of(scenario, target.device)
            if reasons := reasons_against(target.backend, request):
                return State.DECLINED, tuple(str(reason) for reason in reasons)
            values = torch.tensor(_VALUES)
            if self.name not in PER_TOKEN_HEAD_CACHE_DTYPES:  # where one NaN spoils a whole row
                values = torch.cat([values, torch.tensor([float("nan")])])
            size, heads = scenario.head_size, scenario.num_kv_heads
            count = values.repeat(-(-3 * heads * size // values.numel()))[: 3 * heads * size]
            key = count.view(3, heads, size).to(target.device, dtype_of(scenario.dtype))
            cache = poison_(
                allocate_cache(scenario, spec_of(scenario, target.backend), 3, target.device)
            )
            expected = copy_with_storage(cache)
            slots = torch.tensor([2 * block_size, -1, block_size], device=target.device)
            content = CacheContent(size, size, self.name)
            one = torch.ones(1)
            impl = make_impl(
                target.backend,
                scenario,
                scale=1.0,
                alibi_slopes=None,
                sinks=None,
                options=target.options,
            )
            layer = Layer.with_scales(one, one, target.device)
            impl.do_kv_cache_update(layer, key, key, cache, slots)
            write_rows(expected, slots, key, key, content)
            if found := write_complaint(cache, expected, slots, key, key, content):
                raise NonConformanceError(f"block size {block_size}: {found}")
        return PROVED
