"""Broken backends, each with one mistake that was seen in the field, for proving the kit itself.

`SABOTAGES` names for each the scenarios that must catch it and the words that the report must say.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from attnmux.abc.backend import AttentionBackend
from attnmux.testing.sabotage import cache, forward
from attnmux.testing.sabotage.toy import ToyBackend, ToyBuilder, ToyImpl

__all__ = ["SABOTAGES", "Sabotage", "ToyBackend"]


@dataclass(frozen=True)
class Sabotage:
    """One broken backend.

    Attributes:
        name: of the mistake.
        caught_by: a scenario's name contains one of these, and it must fail.
        says: words of its report.
        impl, builder: the broken class; the other is right.
        declined: `supports_*` questions answered with no, though the impl does not refuse.
    """

    name: str
    caught_by: tuple[str, ...]
    says: str
    impl: type[Any] = ToyImpl
    builder: type[Any] = ToyBuilder
    declined: tuple[str, ...] = field(default=())

    def backend(self) -> type[AttentionBackend]:
        """Return the broken backend."""
        members: dict[str, Any] = {
            "get_name": staticmethod(lambda: f"TOY_{self.name.upper()}"),
            "get_impl_cls": staticmethod(lambda: self.impl),
            "get_builder_cls": staticmethod(lambda: self.builder),
        }
        for question in self.declined:
            members[question] = classmethod(lambda cls: False)
        return type(f"Toy{self.name.title().replace('_', '')}", (ToyBackend,), members)


def _answering(name: str, mutate: forward.Mutate, caught_by: str, says: str) -> Sabotage:
    return Sabotage(name, (caught_by,), says, forward.answering(mutate))


_ANSWERS = (
    _answering(
        "window_one_more", forward.window_by(1), "sliding_window", "counts one key too many"
    ),
    _answering(
        "window_one_less", forward.window_by(-1), "sliding_window", "counts one key too few"
    ),
    _answering("window_whole_blocks", forward.whole_block_window, "sliding_window", "are wrong"),
    _answering(
        "window_dropped",
        lambda problem: replace(problem, sliding_window=None),
        "sliding_window",
        "the sliding window is ignored",
    ),
    _answering(
        "sink_dropped",
        lambda problem: replace(problem, sinks=None),
        "sinks",
        "the sink is dropped",
    ),
    _answering("sink_twice", forward.sink_twice, "sinks", "the sink is counted twice"),
    _answering(
        "soft_cap_dropped",
        lambda problem: replace(problem, logits_soft_cap=None),
        "soft_cap",
        "the soft cap is dropped",
    ),
    _answering(
        "alibi_dropped",
        lambda problem: replace(problem, alibi_slopes=None),
        "alibi",
        "ALiBi is dropped",
    ),
    _answering(
        "alibi_always_linear",
        lambda problem: replace(problem, use_alibi_sqrt=False),
        "alibi_sqrt",
        "the other form of ALiBi",
    ),
    _answering(
        "ranges_ignored",
        lambda problem: replace(problem, mm_req_doc_ranges=None),
        "mm_prefix",
        "the multimodal ranges are ignored",
    ),
    _answering(
        "ranges_half_open",
        forward.half_open_ranges,
        "mm_prefix",
        "the last position of a range is left out",
    ),
    _answering(
        "rswa_prefix_windowed",
        forward.ignored_rswa_prefix,
        "rswa",
        "the prefix of the reference window is windowed too",
    ),
    _answering(
        "always_causal",
        lambda problem: replace(problem, causal=True),
        "causal",
        "causal",
    ),
    _answering("top_left_causal", forward.top_left, "extend.plain", "aligned to the first keys"),
    _answering("causal_encoder", forward.causal_encoder, "encoder_only", "look back only"),
    _answering(
        "default_scale",
        lambda problem: replace(problem, scale=None),
        "plain",
        "the softmax scale is the default one",
    ),
    _answering("first_64_dims", forward.first_64_dims, "head_size_80", "are wrong"),
    _answering("heads_in_turns", forward.one_kv_head_for_all, "heads_4_2", "are wrong"),
)

_NOBODY_WROTE = "memory that nobody wrote reaches the output"
SABOTAGES: tuple[Sabotage, ...] = (
    *_ANSWERS,
    Sabotage("nan_leak", ("nan_tails",), _NOBODY_WROTE, forward.NanLeakImpl),
    Sabotage("reads_past_table", ("nan_tails",), "IndexError", forward.ReadsPastTableImpl),
    Sabotage("reads_block_zero", ("nan_tails",), _NOBODY_WROTE, forward.ReadsBlockZeroImpl),
    Sabotage("int32_blocks", ("far_blocks",), _NOBODY_WROTE, forward.Int32OffsetsImpl),
    Sabotage("int32_rows", ("far_rows",), "are wrong", forward.Int32RowsImpl),
    Sabotage("flat_query", ("fused_qkv",), "are wrong", forward.FlatQueryImpl),
    Sabotage("lse_base_2", ("plain",), "it is to base 2", forward.BaseTwoLseImpl),
    Sabotage("lse_zero", ("dummy_rows",), "another log-sum-exp than -inf", forward.ZeroLseImpl),
    Sabotage("zero_by_zero", ("dummy_rows", "padding"), "", forward.DividesByZeroImpl),
    Sabotage("cap_overflows", ("high_scores",), "", forward.ExpCapImpl),
    Sabotage("finite_infinity", ("low_scores",), "are wrong", forward.FiniteInfinityImpl),
    Sabotage("writes_past_end", (".padding",), "wrote outside its output", forward.PastEndImpl),
    Sabotage("skips_padding", (".padding",), "rows of padding", forward.SkipsPaddingImpl),
    Sabotage(
        "key_scale_lost",
        ("cache_fp8_e4m3", "cache_fp8_e5m2"),
        "the scale of the cached keys is lost",
        cache.LostKeyScaleImpl,
    ),
    Sabotage(
        "value_scale_lost",
        ("cache_fp8_e4m3", "cache_fp8_e5m2"),
        "the scale of the cached values is lost",
        cache.LostValueScaleImpl,
    ),
    Sabotage("one_head_scale", ("per_head_scales",), "are wrong", cache.FirstHeadScaleImpl),
    Sabotage("wrong_bits", ("cache_fp8_e5m2",), "reads back as", cache.WrongBitsImpl),
    Sabotage("slot_minus_one", (".padding",), "outside its slots", cache.WritesSlotMinusOneImpl),
    Sabotage("slots_in_a_row", ("plain",), "outside its slots", cache.ConsecutiveSlotsImpl),
    Sabotage("shared_written", ("kv_sharing",), "wrote to the cache", cache.WritesSharedCacheImpl),
    Sabotage("query_scaled", ("plain",), "changed its input query", cache.ScalesQueryInPlaceImpl),
    Sabotage(
        "metadata_changed",
        ("dummy_rows",),
        "changed its input metadata",
        ToyImpl,
        cache.MutatingBuilder,
    ),
    Sabotage("stale_metadata", ("builder_reuse",), "", ToyImpl, cache.StaleBuilder),
    Sabotage(
        "declines_and_drops",
        ("sinks",),
        "selection declines it, yet the impl runs it",
        forward.answering(lambda problem: replace(problem, sinks=None)),
        declined=("supports_sink",),
    ),
)
