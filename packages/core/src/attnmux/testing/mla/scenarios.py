"""Scenarios of latent attention: one step's batch and what is asked of it, as plain values.

Which are run on a backend depends on what it declares: dtypes, cache dtypes, block sizes, layouts,
sparse or dense, non-causal. `attnmux.testing.mla.run` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from attnmux.abc.backend import AttentionBackend
from attnmux.testing.declared import Declared
from attnmux.testing.scenario import Request

MAX_DRAFTS = 7
"""Speculative tokens of the longest decode: with the token itself, 8 queries a request."""

_DECODES = (Request(1, 9), Request(1, 1), Request(1, 33), Request(1, 16), Request(1, 17))
_DRAFTED = (Request(3, 20), Request(1, 1), Request(8, 8), Request(8, 41), Request(2, 17))
_PREFILLS = (Request(19, 19), Request(16, 16), Request(2, 2), Request(33, 33))
_EXTENDS = (Request(12, 13), Request(9, 50), Request(17, 33), Request(16, 32))
_MIXED = (*_DECODES[:3], _PREFILLS[1], *_EXTENDS[:2], Request(0, 0))


@dataclass(frozen=True)
class MlaScenario:
    """What one run asks of a latent backend.

    Attributes:
        name: ``mla.phase.what``.
        topics: rows of the report that this scenario speaks for.
        requests: the batch, decodes first.
        seed: of every random number.
        num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: of the layer.
        dtype, kv_cache_dtype: names.
        block_size, layout: of the cache; `layout` is the name of a `KVCacheLayout`.
        causal: for the whole batch, or each request's own answer where `per_request_causal`.
        num_speculative_tokens: of the engine; a decode has one query more.
        query_in_parts: the absorbed query comes as a pair, not as one tensor.
        padded_heads: heads of the absorbed query after padding; None is none.
        topk: positions listed for each token; None is dense attention.
        pad_tokens, extra_rows: tokens without a request, rows of the tensors behind the last token.
        fused: inputs are views of wider buffers.
        flat: the output of prefills is ``[num_tokens, num_heads * v_head_dim]``.
        index_dtype: of lengths and tables.
        poison, table_tail: what unused memory and table entries past a length hold.
        new_table: metadata is built over another table, which `update_block_table` puts right.
        far_blocks: blocks of the cache lie so far apart that offsets need 64 bits.
        output_fp8: prefills write fp8 with a scale.
    """

    name: str
    topics: tuple[str, ...]
    requests: tuple[Request, ...]
    seed: int = 0
    num_heads: int = 4
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 24
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    layout: str = "LBHNC"
    causal: bool = True
    per_request_causal: bool = False
    num_speculative_tokens: int = 0
    query_in_parts: bool = True
    padded_heads: int | None = None
    topk: int | None = None
    pad_tokens: int = 0
    extra_rows: int = 0
    fused: bool = False
    flat: bool = True
    index_dtype: str = "int32"
    poison: str = "nan"
    table_tail: str = "huge"
    new_table: bool = False
    far_blocks: bool = False
    output_fp8: bool = False

    @property
    def phase(self) -> str:
        """The column of the report."""
        return self.name.split(".")[1]

    @property
    def head_size(self) -> int:
        """Width of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a request."""
        return sum(request.query_len for request in self.requests)

    def causal_of(self, request: Request) -> bool:
        """Whether `request` looks back only."""
        return request.causal if self.per_request_causal else self.causal

    def __str__(self) -> str:
        """Return the scenario as a call, without what is at its default."""
        shown = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"MlaScenario({', '.join(shown)})"


def mla_scenarios(backend: type[AttentionBackend], seed: int = 0) -> list[MlaScenario]:
    """Return every scenario for a latent backend, in the order of the report."""
    declared = Declared.by(backend)
    drawn = [*_batches(), *_heads(), *_memory(), *_forms(declared)]
    if backend.supports_non_causal():
        drawn += _non_causal(backend)
    if backend.is_sparse():
        drawn = [*map(_as_sparse, drawn), *_lists()]
    else:
        drawn += [*_contexts(), *_outputs()]
    return [replace(scenario, seed=seed) for scenario in drawn]


def _plain(phase: str, what: str, topic: str, *requests: Request, **values: object) -> MlaScenario:
    scenario = MlaScenario(f"mla.{phase}.{what}", (topic,), requests)
    return replace(scenario, **values)  # type: ignore[arg-type]


def _batches() -> Iterator[MlaScenario]:
    topic = "latent attention"
    yield _plain("decode", "plain", topic, *_DECODES)
    yield _plain("prefill", "plain", topic, *_PREFILLS)
    yield _plain("extend", "plain", topic, *_EXTENDS)
    yield _plain("mixed", "plain", topic, *_MIXED)
    yield _plain("decode", "one_tensor", "query forms", *_DECODES, query_in_parts=False)
    drafts = {"num_speculative_tokens": MAX_DRAFTS}
    yield _plain("decode", "drafts", "several queries a decode", *_DRAFTED, **drafts)
    yield _plain("mixed", "drafts", "several queries a decode", *_DRAFTED, *_PREFILLS[:2], **drafts)


def _heads() -> Iterator[MlaScenario]:
    for num_heads in (1, 3, 16, 128):
        yield _plain(
            "mixed", f"heads_{num_heads}", "head counts", *_MIXED[1:5], num_heads=num_heads
        )
    yield _plain("decode", "padded_heads", "padded heads", *_DECODES, num_heads=5, padded_heads=16)
    yield _plain(
        "decode",
        "padded_heads_one_tensor",
        "padded heads",
        *_DECODES,
        padded_heads=8,
        query_in_parts=False,
    )
    # Sizes of DeepSeek-V3's heads: keys of 192, values of 128, a latent of 512.
    yield _plain(
        "mixed",
        "deepseek_sizes",
        "head sizes",
        *_MIXED[:5],
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    yield _plain(
        "mixed",
        "wide_values",
        "head sizes",
        *_MIXED,
        kv_lora_rank=40,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=96,
    )


def _memory() -> Iterator[MlaScenario]:
    # A captured graph is padded with queries without a key and places without a query.
    empty = (Request(1, 0), Request(0, 0), Request(0, 7))
    yield _plain("decode", "dummy_rows", "padding", *_DECODES, *empty)
    yield _plain("decode", "pad_tokens", "padding", *_DECODES, pad_tokens=3, extra_rows=2)
    yield _plain("mixed", "pad_tokens", "padding", *_MIXED, pad_tokens=3, extra_rows=2)
    yield _plain("decode", "only_empty", "padding", Request(0, 0), Request(0, 7), pad_tokens=2)
    for phase, requests in (("mixed", _MIXED), ("decode", _DECODES)):
        yield _plain(
            phase,
            "finite_tails",
            "memory nobody wrote",
            *requests,
            poison="finite",
            table_tail="poisoned",
        )
        yield _plain(phase, "fused", "strided inputs", *requests, fused=True, flat=False)
        yield _plain(phase, "int64", "index dtypes", *requests, index_dtype="int64")
    yield _plain("mixed", "new_table", "update_block_table", *_MIXED, new_table=True)


def _forms(declared: Declared) -> Iterator[MlaScenario]:
    for dtype in declared.dtypes:
        yield _plain("mixed", f"dtype_{dtype}", "dtypes", *_MIXED, dtype=dtype)
    for name in declared.cache_dtypes:
        for dtype in declared.dtypes:
            if name != "auto":
                label = f"cache_{name}_{dtype}"
                values = {"kv_cache_dtype": name, "dtype": dtype}
                yield _plain("mixed", label, f"cache {name}", *_MIXED, **values)
    for size in declared.block_sizes:
        yield _plain("mixed", f"block_size_{size}", "block sizes", *_MIXED, block_size=size)
    # Two blocks, the second past 2**31 elements; memory that is not touched costs nothing.
    narrow = "bfloat16" if "bfloat16" in declared.dtypes else declared.dtypes[0]
    for phase, query_len in (("decode", 1), ("extend", 2)):
        request = Request(query_len, declared.block_sizes[0] + 3)
        yield _plain(
            phase,
            "far_blocks",
            "offsets past 2**31",
            request,
            dtype=narrow,
            block_size=declared.block_sizes[0],
            far_blocks=True,
        )
    for layout in declared.layouts:
        yield _plain("mixed", f"layout_{layout}", "cache layouts", *_MIXED, layout=layout)


def _non_causal(backend: type[AttentionBackend]) -> list[MlaScenario]:
    drafts = {"num_speculative_tokens": MAX_DRAFTS}
    requests = (*_DRAFTED[2:4], *_PREFILLS[:2], _EXTENDS[1])
    scenarios = [
        _plain("mixed", "non_causal", "non-causal", *requests, causal=False, **drafts),
        _plain("decode", "non_causal", "non-causal", *_DRAFTED, causal=False, **drafts),
    ]
    if backend.supports_per_request_causal():
        flags = (replace(r, causal=i % 2 == 0) for i, r in enumerate(requests))
        topic = "causal per request"
        values = {"per_request_causal": True, **drafts}
        scenarios.append(_plain("mixed", "per_request_causal", topic, *flags, **values))
    return scenarios


def _contexts() -> Iterator[MlaScenario]:
    """Contexts that do not fit a workspace, beside some that are used up or empty."""
    topic = "chunked context"
    small = {"num_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 8}
    lengths = (Request(9, 9), Request(7, 107), Request(5, 5005))
    yield _plain("extend", "contexts", topic, *lengths, **small)
    yield _plain("extend", "contexts_non_causal", topic, *lengths[:2], causal=False, **small)
    uneven = (Request(4, 2004), *[Request(3, 19)] * 5, Request(2, 2))
    yield _plain("extend", "uneven_contexts", topic, *uneven, **small)
    long_decode = (Request(1, 5), Request(1, 6000), Request(1, 130))
    yield _plain("decode", "long_context", "long context", *long_decode, **small)


def _outputs() -> Iterator[MlaScenario]:
    for flat in (True, False):
        label = "output_fp8" if flat else "output_fp8_3d"
        yield _plain(
            "prefill",
            label,
            "quantised output",
            *_PREFILLS[:2],
            *_EXTENDS[:2],
            output_fp8=True,
            flat=flat,
        )


def _as_sparse(scenario: MlaScenario) -> MlaScenario:
    # Fewer positions than most contexts, more than the shortest.
    return replace(scenario, topk=6)


def _lists() -> Iterator[MlaScenario]:
    topic = "top-k lists"
    yield _plain("mixed", "one_position", topic, *_MIXED, topk=1)
    yield _plain("mixed", "longer_than_context", topic, *_MIXED, topk=70)
    yield _plain("decode", "long_context", topic, Request(1, 3000), Request(1, 3), topk=64)
