"""What every metadata builder inherits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnmux.backend import AttentionCGSupport, AttentionMetadataBuilder
from attnmux.batch import make_metadata
from attnmux.config import EngineConfig, ParallelConfig, SpeculativeConfig
from attnmux.kv_cache import FullAttentionSpec

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)


class Recorder(AttentionMetadataBuilder[Any]):
    """Its metadata is what `build` was called with."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> dict[str, Any]:
        return {"prefix": common_prefix_len, "batch": common_attn_metadata, "fast": fast_build}


def builder(config: Any = None) -> Recorder:
    return Recorder(SPEC, ["layer.0"], config or EngineConfig(), torch.device("cpu"))


def test_the_constructor_keeps_what_it_is_given() -> None:
    config = EngineConfig()
    made = builder(config)
    assert made.kv_cache_spec is SPEC
    assert made.layer_names == ["layer.0"]
    assert made.vllm_config is config
    assert made.device == torch.device("cpu")
    assert made.kernel_block_size is None
    made.set_kernel_block_size(8)
    assert made.kernel_block_size == 8
    with pytest.raises(ValueError, match=r"kernel_block_size: got 0; allowed: an integer of at"):
        made.set_kernel_block_size(0)
    assert made.kernel_block_size == 8


@pytest.mark.parametrize("missing", ["__init__", "build"])
def test_constructor_and_build_are_the_builders_own(missing: str) -> None:
    members = {"__init__": Recorder.__init__, "build": Recorder.build}
    del members[missing]
    incomplete = type("Incomplete", (AttentionMetadataBuilder,), members)
    with pytest.raises(TypeError, match=missing):
        incomplete(SPEC, [], EngineConfig(), torch.device("cpu"))


def test_graphs_are_not_supported_unless_a_subclass_says_so() -> None:
    assert Recorder.get_cudagraph_support(EngineConfig(), SPEC) is AttentionCGSupport.NEVER
    able = type("Able", (Recorder,), {"_cudagraph_support": AttentionCGSupport.UNIFORM_BATCH})
    assert able.get_cudagraph_support(EngineConfig(), SPEC) is AttentionCGSupport.UNIFORM_BATCH


def test_support_for_graphs_is_ordered() -> None:
    ordered = [
        AttentionCGSupport.NEVER,
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        AttentionCGSupport.UNIFORM_BATCH,
        AttentionCGSupport.ALWAYS,
    ]
    assert [support.value for support in ordered] == [0, 1, 2, 3]


# threshold, spec as decode, dcp with varlen | drafts, parallel drafting, dcp size | expected
THRESHOLDS = [
    ((1, False, False), (None, False, 1), 1),
    ((4, False, False), (3, False, 1), 4),  # drafts count only where they run as decodes
    ((1, True, False), (None, False, 1), 1),
    ((1, True, False), (3, False, 1), 4),
    ((1, True, False), (3, True, 1), 7),
    ((8, True, False), (3, False, 1), 8),
    ((None, True, False), (3, False, 1), None),
    ((None, False, False), (None, False, 1), None),
    ((4, False, False), (None, False, 2), 1),
    ((1, True, False), (3, False, 2), 1),
    ((None, False, False), (None, False, 2), 1),
    ((1, True, True), (3, False, 2), 4),
    ((4, False, True), (None, False, 8), 4),
]


@pytest.mark.parametrize(("arguments", "settings", "expected"), THRESHOLDS, ids=str)
def test_the_threshold_of_decodes(
    arguments: tuple[int | None, bool, bool],
    settings: tuple[int | None, bool, int],
    expected: int | None,
) -> None:
    drafts, parallel_drafting, dcp_size = settings
    speculative = SpeculativeConfig(drafts, parallel_drafting) if drafts is not None else None
    made = builder(
        EngineConfig(
            speculative_config=speculative,
            parallel_config=ParallelConfig(decode_context_parallel_size=dcp_size),
        )
    )
    made._init_reorder_batch_threshold(*arguments)
    assert made.reorder_batch_threshold == expected
    assert Recorder.reorder_batch_threshold is None


def test_speculation_without_a_number_of_drafts_changes_nothing() -> None:
    made = builder(EngineConfig(speculative_config=SpeculativeConfig(None)))
    made._init_reorder_batch_threshold(2, supports_spec_as_decode=True)
    assert made.reorder_batch_threshold == 2


def test_speculation_is_looked_up_only_by_builders_that_run_drafts_as_decodes() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))
    made = builder(config)
    made._init_reorder_batch_threshold(3)
    assert made.reorder_batch_threshold == 3


def test_an_engines_own_settings_object_is_taken_as_it_is() -> None:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    made = builder(config)
    made._init_reorder_batch_threshold(supports_spec_as_decode=True)
    assert made.reorder_batch_threshold == 3


@pytest.mark.parametrize("num_reqs", [1, 2, 8])
@pytest.mark.parametrize("query_len", [1, 4])
def test_metadata_for_capture_is_built_as_any_other(query_len: int, num_reqs: int) -> None:
    # B79: a captured uniform decode may have several tokens a request.
    batch = make_metadata([query_len] * num_reqs, [32] * num_reqs, [[0, 1]] * num_reqs, 16)
    built = builder().build_for_cudagraph_capture(batch)
    assert built == {"prefix": 0, "batch": batch, "fast": False}
    assert built["batch"].num_actual_tokens == query_len * num_reqs


@pytest.mark.parametrize("draft_index", [0, 3])
def test_metadata_for_drafting_is_built_fast(draft_index: int) -> None:
    batch = make_metadata([1], [1], [[0]], 16)
    built = builder().build_for_drafting(batch, draft_index)
    assert built == {"prefix": 0, "batch": batch, "fast": True}


@pytest.mark.parametrize(
    ("method", "num_arguments"), [("update_block_table", 3), ("update_draft_decode_metadata", 1)]
)
def test_what_a_builder_does_not_offer_is_not_pretended(method: str, num_arguments: int) -> None:
    with pytest.raises(NotImplementedError):
        getattr(builder(), method)(*[None] * num_arguments)


def test_cascade_attention_is_not_used_by_default() -> None:
    used = builder().use_cascade_attention(
        common_prefix_len=4096,
        query_lens=np.ones(64, dtype=np.int32),
        num_query_heads=32,
        num_kv_heads=8,
        use_alibi=False,
        use_sliding_window=False,
        use_local_attention=False,
        num_sms=132,
        dcp_world_size=1,
    )
    assert used is False
