"""Latent attention refuses bad input with the argument's name before anything is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.batch import make_metadata
from attnmux.config import EngineConfig
from attnmux.create import create_builder, create_impl
from attnmux.kv_cache import KVCacheLayout, MLAAttentionSpec, allocate
from attnmux_cpu.mla_backend import CPUMLABackend, CPUMLASparseBackend
from attnmux_cpu.mla_impl import CPUMLAImpl, CPUMLASparseImpl
from attnmux_cpu.options import CPUAttentionOptions

HEADS, RANK, NOPE, ROPE, VALUE = 2, 8, 4, 4, 4
FP8 = torch.float8_e4m3fn
IMPL: dict[str, Any] = {
    "num_heads": HEADS,
    "head_size": RANK + ROPE,
    "scale": 0.3,
    "num_kv_heads": 1,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "qk_head_dim": NOPE + ROPE,
    "v_head_dim": VALUE,
    "kv_b_proj": lambda x: x.new_zeros(x.shape[0], HEADS * (NOPE + VALUE)),
}
SPEC = MLAAttentionSpec.for_layer(
    block_size=4, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.float32
)
BATCH = make_metadata([1, 5], [9, 5], [[0, 1, 2], [3, 4]], 4)  # a decode, then a prefill


def new_cache() -> torch.Tensor:
    return allocate({"layer": SPEC}, 5, KVCacheLayout.LBNHC).views["layer"]


def new_builder(backend: Any = CPUMLABackend) -> Any:
    return create_builder(backend, SPEC, ["layer"], EngineConfig(), "cpu")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scale": None}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"q_pad_num_heads": "2"}, "q_pad_num_heads"),
        ({"q_pad_num_heads": 1}, "q_pad_num_heads"),
    ],
)
def test_impls_that_cannot_be(changes, named):
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        create_impl(CPUMLABackend, **(IMPL | changes))


def test_options_of_another_backend_are_refused_by_the_constructor():
    with pytest.raises(ValueError, match=r"^options: got CPUAttentionOptions"):
        CPUMLAImpl(**IMPL, options=CPUAttentionOptions())


# Fields of the batch and the name in the error. What latent attention has not is never dropped.
BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"mm_req_doc_ranges": {0: [(0, 3)]}}, "mm_req_doc_ranges"),
    ({"rswa_prefix_lens": torch.tensor([1, 2])}, "rswa_prefix_lens"),
    ({"seq_lens": torch.tensor([-9, 5])}, "seq_lens"),
    ({"query_start_loc": torch.tensor([0, 6, 1])}, "query_start_loc"),
    ({"query_start_loc": torch.tensor([2, 3, 6])}, "query_start_loc"),
    ({"query_start_loc": torch.tensor([0, 1, 9])}, r"query_start_loc\[-1\]"),
    ({"causal": [True, False]}, "causal"),
    ({"causal": None}, "causal"),
]


@pytest.mark.parametrize("backend", [CPUMLABackend, CPUMLASparseBackend])
@pytest.mark.parametrize(("changes", "named"), BATCHES, ids=lambda value: str(value)[:40])
def test_batches_that_do_not_fit(backend, changes, named):
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        new_builder(backend).build(0, BATCH.replace(**changes))


@pytest.mark.parametrize("backend", [CPUMLABackend, CPUMLASparseBackend])
def test_a_batch_that_is_no_batch_is_named(backend):
    with pytest.raises(ValueError, match=r"^common_attn_metadata: got NoneType"):
        new_builder(backend).build(0, None)


def test_empty_ranges_of_a_text_only_batch_ask_for_nothing():
    assert new_builder().build(0, BATCH.replace(mm_req_doc_ranges={})).num_decodes == 1


def test_prefills_that_begin_elsewhere_on_the_device_are_refused():
    moved = BATCH.replace(query_start_loc=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match=r"^query_start_loc: got"):
        new_builder().build(0, moved)


def test_drafts_that_verification_shortened_on_the_device_are_taken():
    batch = make_metadata([1, 1], [9, 5], [[0, 1, 2], [3, 4]], 4)
    shortened = batch.replace(query_start_loc=torch.tensor([0, 2, 2]))
    assert new_builder().build(0, shortened).num_decodes == 2


MHA: list[tuple[str, Any, str]] = [
    ("q", lambda t: None, "q"),
    ("kv_c_normed", lambda t: None, "kv_c_normed"),
    ("k_pe", lambda t: None, "k_pe"),
    ("kv_c_and_k_pe_cache", lambda t: None, "kv_c_and_k_pe_cache"),
    ("attn_metadata", lambda m: None, "attn_metadata"),
    ("attn_metadata", lambda m: SimpleNamespace(num_prefill_tokens=5), "attn_metadata"),
    ("output", lambda t: None, "output"),
    ("output", lambda t: torch.tensor(1.0), "output.shape"),
    ("output", lambda t: t.half(), "output.dtype"),
    ("output", lambda t: t.to("meta"), "output.device"),
    ("output", lambda t: t.to(FP8), "output_scale"),
    ("output_scale", lambda s: torch.ones(1), "output.dtype"),
]


@pytest.mark.parametrize(("argument", "change", "named"), MHA)
def test_arguments_of_forward_mha(argument, change, named):
    output = torch.full((5, HEADS * VALUE), torch.nan)
    arguments: dict[str, Any] = {
        "q": torch.zeros(5, HEADS, NOPE + ROPE),
        "kv_c_normed": torch.zeros(5, RANK),
        "k_pe": torch.zeros(5, 1, ROPE),
        "kv_c_and_k_pe_cache": new_cache(),
        "attn_metadata": new_builder().build(0, BATCH),
        "k_scale": torch.ones(1),
        "output": output,
        "output_scale": None,
    }
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        create_impl(CPUMLABackend, **IMPL).forward_mha(**arguments)
    assert output.isnan().all()


def test_an_up_projection_that_gives_nothing_is_named():
    impl = create_impl(CPUMLABackend, **(IMPL | {"kv_b_proj": lambda x: None}))
    with pytest.raises(ValueError, match=r"^kv_b_proj\(kv_c_normed\): got NoneType"):
        impl.forward_mha(
            torch.zeros(5, HEADS, NOPE + ROPE),
            torch.zeros(5, RANK),
            torch.zeros(5, 1, ROPE),
            new_cache(),
            new_builder().build(0, BATCH),
            torch.ones(1),
            torch.zeros(5, HEADS * VALUE),
        )


MQA: list[tuple[str, Any, str]] = [
    ("q", lambda t: None, "q"),
    ("q", lambda t: 3, "q"),
    ("q", lambda t: (t[..., :RANK], None), r"q\[1\]"),
    ("kv_c_and_k_pe_cache", lambda t: None, "kv_c_and_k_pe_cache"),
    ("attn_metadata", lambda m: None, "attn_metadata"),
    ("attn_metadata", lambda m: new_builder(CPUMLASparseBackend).build(0, BATCH), "attn_metadata"),
]


@pytest.mark.parametrize(("argument", "change", "named"), MQA)
def test_arguments_of_forward_mqa(argument, change, named):
    arguments: dict[str, Any] = {
        "q": torch.zeros(1, HEADS, RANK + ROPE),
        "kv_c_and_k_pe_cache": new_cache(),
        "attn_metadata": new_builder().build(0, BATCH),
        "layer": None,
    }
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        create_impl(CPUMLABackend, **IMPL).forward_mqa(**arguments)


def test_sparse_attention_refuses_the_dense_metadata():
    indexer = SimpleNamespace(topk_indices_buffer=torch.zeros(6, 1, dtype=torch.int32))
    impl = CPUMLASparseImpl(**IMPL, indexer=indexer)
    with pytest.raises(ValueError, match=r"^attn_metadata: got CPUMLADenseMetadata"):
        impl.forward_mqa(
            torch.zeros(6, HEADS, RANK + ROPE), new_cache(), new_builder().build(0, BATCH), None
        )


def test_a_layer_without_scales_serves_a_cache_that_is_not_quantised():
    output, _ = create_impl(CPUMLABackend, **IMPL).forward_mqa(
        torch.zeros(1, HEADS, RANK + ROPE), new_cache(), new_builder().build(0, BATCH), None
    )
    assert (output == 0).all()


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("kv_c_normed", None, "kv_c_normed"),
        ("k_pe", None, "k_pe"),
        ("kv_cache", None, "kv_cache"),
        ("slot_mapping", None, "slot_mapping"),
        ("slot_mapping", torch.zeros(6), "slot_mapping.dtype"),
    ],
)
def test_arguments_of_the_cache_update(argument, value, named):
    cache = new_cache()
    arguments: dict[str, Any] = {
        "kv_c_normed": torch.ones(6, RANK),
        "k_pe": torch.ones(6, 1, ROPE),
        "kv_cache": cache,
        "slot_mapping": BATCH.slot_mapping,
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones(1),
    }
    arguments[argument] = value
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        create_impl(CPUMLABackend, **IMPL).do_kv_cache_update(**arguments)
    assert (cache == 0).all()


@pytest.mark.parametrize("backend", [CPUMLABackend, CPUMLASparseBackend])
def test_buffers_longer_than_the_batch_are_read_up_to_its_requests(
    backend: type[CPUMLABackend],
) -> None:
    exact = make_metadata([1, 5], [9, 5], [[3, 1], [2, 0]], 8)
    longer = exact.replace(
        query_start_loc=torch.cat([exact.query_start_loc, torch.full((3,), 99, dtype=torch.int32)]),
        query_start_loc_cpu=torch.cat(
            [exact.query_start_loc_cpu, torch.full((3,), 99, dtype=torch.int32)]
        ),
        seq_lens=torch.cat([exact.seq_lens, torch.full((3,), -7, dtype=torch.int32)]),
        block_table_tensor=torch.cat(
            [exact.block_table_tensor, torch.full((3, 2), 2**30, dtype=torch.int32)]
        ),
    )
    builder = create_builder(backend, SPEC, ["a"], EngineConfig(), "cpu")
    one, other = builder.build(0, exact), builder.build(0, longer)
    for name in ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"):
        assert getattr(one, name) == getattr(other, name)
    for name in ("query_start_loc", "seq_lens", "num_cached", "block_table"):
        assert torch.equal(getattr(one, name), getattr(other, name))
