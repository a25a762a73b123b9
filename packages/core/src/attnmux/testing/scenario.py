"""A scenario: one step's batch and what is asked of it, as plain values.

Everything here is small and printable, so that a failure can be pasted. Tensors are made from it by
`attnmux.testing.case`, always the same ones for the same scenario.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

PHASES = ("prefill", "extend", "decode", "mixed")


@dataclass(frozen=True)
class Request:
    """One request of a batch.

    Attributes:
        query_len: new tokens; 0 for a request that only fills a place.
        seq_len: tokens after this step; 0 with a query is the dummy row of a captured graph.
        causal: whether it looks back only, where the batch decides for each request.
        ranges: inclusive ranges of positions that see each other both ways.
        rswa_prefix: keys below this position stay visible under reference sliding windows.
        encoder_len: keys of the encoder, for cross attention.
    """

    query_len: int
    seq_len: int
    causal: bool = True
    ranges: tuple[tuple[int, int], ...] = ()
    rswa_prefix: int = 0
    encoder_len: int = 0

    def __repr__(self) -> str:
        """Return it as a call, without what is at its default."""
        more = (
            f", {field.name}={getattr(self, field.name)!r}"
            for field in fields(self)[2:]
            if getattr(self, field.name) != field.default
        )
        return f"Request({self.query_len}, {self.seq_len}{''.join(more)})"


@dataclass(frozen=True)
class Scenario:
    """What one run of the kit asks of a backend.

    Attributes:
        name: ``phase.feature+feature``, unique for one backend; the draw depends on it and `seed`.
        seed: of every random number.
        phase: one of `PHASES`.
        topics: rows of the report that this scenario speaks for.
        requests: the batch.
        num_heads, num_kv_heads, head_size: of the layer.
        head_size_v: of values and output, where it is another one.
        dtype, kv_cache_dtype: names, as in "bfloat16" and "fp8_e4m3".
        block_size, layout: of the cache; `layout` is the name of a `KVCacheLayout`.
        attn_type: value of an `AttentionType`.
        sliding_window, logits_soft_cap, rswa_window: None is none.
        alibi: "", "linear" or "sqrt".
        sinks, causal, per_request_causal, per_head_scales, kv_sharing: as they say.
        cacheless: cross attention whose keys come with the call.
        pad_requests, pad_tokens, extra_rows: places without a request, tokens without a request,
            rows of the tensors behind the last token.
        short_slots: the slot mapping ends before the padded tokens.
        strides: "contiguous", "fused" (views of one query-key-value buffer), "transposed" (the
            value alone has a strange order) or "far" (rows of query and output lie so far apart
            that offsets pass 2**31 elements).
        far_blocks: the same for the blocks of the cache.
        flat: query and output are ``[num_tokens, num_heads * head_size]``.
        index_dtype: of lengths and tables.
        poison: what memory that nobody wrote holds.
        forget_unseen: blocks that no query sees hold poison, as when a window's blocks are freed.
        table_tail: what table entries past a request's length hold: "huge" or "poisoned" block ids.
        size: factor of the query, so of the scores.
        output_quant: name of a quantisation of the output, or "".
    """

    name: str
    seed: int
    phase: str
    topics: tuple[str, ...]
    requests: tuple[Request, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int | None = None
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    layout: str = "LBHNC"
    attn_type: str = "decoder"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    rswa_window: int | None = None
    alibi: str = ""
    sinks: bool = False
    causal: bool = True
    per_request_causal: bool = False
    per_head_scales: bool = False
    kv_sharing: bool = False
    cacheless: bool = False
    pad_requests: int = 0
    pad_tokens: int = 0
    extra_rows: int = 0
    short_slots: bool = False
    strides: str = "contiguous"
    far_blocks: bool = False
    flat: bool = False
    index_dtype: str = "int32"
    poison: str = "nan"
    forget_unseen: bool = False
    table_tail: str = "huge"
    size: float = 1.5
    output_quant: str = ""

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return [request.query_len for request in self.requests]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request after the step."""
        return [request.seq_len for request in self.requests]

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a request."""
        return sum(self.query_lens)

    @property
    def is_encoder(self) -> bool:
        """Whether keys are the request's own rows and nothing is cached."""
        return self.attn_type in ("encoder", "encoder_only")

    @property
    def is_cross(self) -> bool:
        """Whether keys are an encoder's."""
        return self.attn_type == "encoder_decoder"

    @property
    def value_size(self) -> int:
        """Head size of values and output."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def uses_cache(self) -> bool:
        """Whether keys are read from the paged cache."""
        return not (self.is_encoder or self.cacheless)

    @property
    def has_ranges(self) -> bool:
        """Whether any request has multimodal ranges."""
        return any(request.ranges for request in self.requests)

    def num_keys(self, request: Request) -> int:
        """How many keys `request` has in this scenario."""
        if self.is_cross:
            return request.encoder_len
        return request.query_len if self.is_encoder else request.seq_len

    def in_order_for(self, decode_threshold: int | None) -> Scenario:
        """Put decodes first, where a builder asks for it, and empty places last."""
        if decode_threshold is None:
            return self

        def rank(request: Request) -> int:
            if request.query_len == 0:
                return 2
            return 0 if request.query_len <= decode_threshold else 1

        return replace(self, requests=tuple(sorted(self.requests, key=rank)))

    def __str__(self) -> str:
        """Return the scenario as a call, without what is at its default."""
        shown = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"Scenario({', '.join(shown)})"


def with_topics(scenario: Scenario, topics: Iterable[str]) -> Scenario:
    """Return the scenario speaking for more rows of the report."""
    return replace(scenario, topics=tuple(dict.fromkeys((*scenario.topics, *topics))))
