"""Bad input is refused with the argument's name before anything is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnmux
from attnmux.config import EngineConfig, ModelConfig
from attnmux.kv_cache import FullAttentionSpec
from attnmux_cpu.backend import CPUAttentionBackend
from attnmux_cpu.options import CPUAttentionOptions, CPUMLAOptions

PLAIN = {"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2}

IMPLS: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 3}, "num_heads"),
    ({"num_heads": 33}, "num_heads"),
    ({"num_heads": 0}, "num_heads"),
    ({"num_kv_heads": -1}, "num_kv_heads"),
    ({"head_size": 0}, "head_size"),
    ({"head_size_v": 0}, "head_size_v"),
    ({"sliding_window": 0}, "sliding_window"),
    ({"sliding_window": -1}, "sliding_window"),
    ({"alibi_slopes": [0.5] * 3}, "alibi_slopes"),
    ({"use_alibi_sqrt": True}, "alibi_slopes"),
    ({"sinks": torch.zeros(3)}, "sinks.shape"),
    ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks.dtype"),
    ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
    ({"logits_soft_cap": float("nan")}, "logits_soft_cap"),
    ({"logits_soft_cap": float("inf")}, "logits_soft_cap"),
    ({"logits_soft_cap": "30"}, "logits_soft_cap"),
    ({"scale": None}, "scale"),
    ({"scale": float("nan")}, "scale"),
    ({"alibi_slopes": 0.5}, "alibi_slopes"),
    ({"alibi_slopes": torch.ones(4, 2)}, "alibi_slopes.shape"),
    ({"alibi_slopes": torch.ones(4, device="meta")}, "alibi_slopes.device"),
    ({"sinks": torch.zeros(4, device="meta")}, "sinks.device"),
    ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
    ({"attn_type": "sideways"}, "attn_type"),
    ({"attn_type": "encoder_decoder", "sliding_window": 4}, "sliding_window"),
    ({"attn_type": "encoder_decoder", "alibi_slopes": [0.5] * 4}, "alibi_slopes"),
]


@pytest.mark.parametrize(("changes", "named"), IMPLS, ids=str)
def test_impls_that_cannot_be(changes, named):
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        attnmux.create_impl(CPUAttentionBackend, **(PLAIN | changes))


@pytest.mark.parametrize("name", ["dcp_world_size", "pcp_world_size"])
def test_context_parallelism_is_refused(monkeypatch, name):
    impl_cls = CPUAttentionBackend.get_impl_cls()
    impl = impl_cls.__new__(impl_cls)
    setattr(impl, name, 2)
    with pytest.raises(ValueError, match=f"^{name}: got 2"):
        impl.__init__(**PLAIN)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"workspace_bytes": 1000}, "workspace_bytes"),
        ({"workspace_bytes": float(2 << 20)}, "workspace_bytes"),
        ({"workspace_bytes": "2 MiB"}, "workspace_bytes"),
        ({"max_grouped_queries": 0}, "max_grouped_queries"),
    ],
)
def test_options_out_of_range(fields, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        CPUAttentionOptions(**fields)


def test_options_of_another_backend_are_refused_by_the_constructor():
    with pytest.raises(ValueError, match=r"^options: got CPUMLAOptions"):
        CPUAttentionBackend.get_impl_cls()(**PLAIN, options=CPUMLAOptions())


# What replaces an argument of `forward`, given the right one, and what the error begins with.
FORWARD: list[tuple[str, Any, str]] = [
    ("query", lambda t: t[0], "query.shape"),
    ("query", lambda t: t[:, :3], "query.shape"),
    ("query", lambda t: t[:, :, :16], "query.shape"),
    ("query", lambda t: t.flatten(1)[:, :-1], "query.shape"),
    ("query", lambda t: t[:-1], r"query.shape\[0\]"),
    ("query", lambda t: t.double(), "query.dtype"),
    ("query", lambda t: t.int(), "query.dtype"),
    ("query", lambda t: t.to("meta"), "query.device"),
    ("query", lambda t: None, "query"),
    # Read from the cache instead, yet a wrong shape here was written there.
    ("key", lambda t: t[:, :1], "key.shape"),
    ("key", lambda t: t.int(), "key.dtype"),
    ("value", lambda t: t[..., :16], "value.shape"),
    ("kv_cache", lambda t: None, "kv_cache"),
    ("kv_cache", lambda t: t[0], "kv_cache.shape"),
    ("kv_cache", lambda t: t[:, :1], "kv_cache.shape"),
    ("kv_cache", lambda t: t[:, :, :8], "kv_cache.shape"),
    ("kv_cache", lambda t: t.transpose(1, 2), "kv_cache.shape"),
    ("kv_cache", lambda t: t[..., :63], "kv_cache.shape"),
    ("kv_cache", lambda t: t.half(), "kv_cache.dtype"),
    ("kv_cache", lambda t: torch.cat([t, t], -1)[..., ::2], r"kv_cache.stride\(-1\)"),
    ("kv_cache", lambda t: t.to("meta"), "kv_cache.device"),
    ("kv_cache", lambda t: t[:2], "block_table"),
    ("output", lambda t: t[:, :3], "output.shape"),
    ("output", lambda t: t[..., :31], "output.shape"),
    ("output", lambda t: t.flatten(1)[:, :-1], "output.shape"),
    ("output", lambda t: t[:-1], r"output.shape\[0\]"),
    ("output", lambda t: t.half(), "output.dtype"),
    ("output", lambda t: t.double(), "output.dtype"),
    ("output", lambda t: None, "output"),
    ("output", lambda t: t[:1].expand(t.shape), r"output.stride\(\)"),
    ("metadata", lambda m: None, "attn_metadata"),
    ("metadata", lambda m: SimpleNamespace(), "attn_metadata"),
]


@pytest.mark.parametrize(("argument", "change", "named"), FORWARD)
def test_arguments_of_forward(built, argument, change, named):
    step = built([1, 5], [50, 20])
    step.update()
    output = step.new_output()
    arguments = {
        "layer": step.layer,
        "query": step.query,
        "key": step.key,
        "value": step.value,
        "kv_cache": step.cache,
        "metadata": step.builder.build(0, step.batch),
        "output": output,
    }
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        step.impl.forward(*arguments.values())
    assert output.isnan().all()


@pytest.mark.parametrize("query", [None, torch.tensor(1.0)], ids=["none", "no dimensions"])
def test_a_query_that_is_none_is_named_where_log_sum_exp_is_asked_for(built, query):
    step = built([1, 5], [50, 20])
    step.update()
    with pytest.raises(ValueError, match=r"^query.*: got .*; allowed: "):
        step.impl.forward_with_lse(
            step.layer, query, step.key, step.value, step.cache,
            step.builder.build(0, step.batch), step.new_output(),
        )  # fmt: skip


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
@pytest.mark.parametrize(
    ("argument", "change", "named"),
    [
        ("key", lambda t: None, "key"),
        ("key", lambda t: t[:, :1], "key.shape"),
        ("key", lambda t: t[:-1], "key.shape"),
        ("key", lambda t: t.half(), "key.dtype"),
        ("value", lambda t: t[..., :8], "value.shape"),
        ("value", lambda t: t[:-1], "value.shape"),
        ("value", lambda t: t.half(), "value.dtype"),
    ],
)
def test_keys_that_come_with_the_call(built, attn_type, argument, change, named):
    step = built([4, 5], [4, 5], attn_type=attn_type, cacheless=True)
    setattr(step, argument, change(getattr(step, argument)))
    with pytest.raises(ValueError, match=f"^{named}"):
        step.attend()


UPDATE: list[tuple[str, Any, str]] = [
    ("key", lambda t: None, "key"),
    ("key", lambda t: t[:, :1], "key.shape"),
    ("key", lambda t: t[..., :8], "key.shape"),
    ("key", lambda t: t.double(), "key.dtype"),
    ("key", lambda t: t.half(), "value.dtype"),
    ("value", lambda t: t[:-1], "value.shape"),
    ("value", lambda t: t[..., :8], "value.shape"),
    ("kv_cache", lambda t: t[:, :, :, :40], "kv_cache.shape"),
    ("kv_cache", lambda t: t.bfloat16(), "kv_cache.dtype"),
    ("kv_cache", lambda t: torch.empty(0), "kv_cache.shape"),
    ("kv_cache", lambda t: t[:1].expand(t.shape), r"kv_cache.stride\(\)"),
    ("slots", lambda t: t.float(), "slot_mapping.dtype"),
    ("slots", lambda t: t.to(torch.int16), "slot_mapping.dtype"),
    ("slots", lambda t: t.unsqueeze(0), "slot_mapping.shape"),
    ("slots", lambda t: torch.cat([t, t]), "slot_mapping.shape"),
    ("slots", lambda t: t.index_fill(0, torch.tensor([3]), 10**6), "slot_mapping"),
    ("slots", lambda t: t.index_fill(0, torch.tensor([3]), -2), "slot_mapping"),
    ("slots", lambda t: t.to("meta"), "slot_mapping.device"),
]


@pytest.mark.parametrize(("argument", "change", "named"), UPDATE)
def test_arguments_of_the_cache_update(built, argument, change, named):
    step = built([1, 5], [50, 20])
    arguments = {
        "key": step.key,
        "value": step.value,
        "kv_cache": step.cache,
        "slots": step.batch.slot_mapping,
    }
    before = step.cache.clone()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        step.impl.do_kv_cache_update(step.layer, *arguments.values())
    assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))


def test_the_first_slot_past_the_cache_is_refused(built):
    step = built([1], [5])
    num_slots = step.cache.shape[0] * step.cache.shape[2]
    for slot in (num_slots, 75849):
        with pytest.raises(ValueError, match=r"^slot_mapping: got"):
            step.impl.do_kv_cache_update(
                step.layer, step.key, step.value, step.cache, torch.tensor([slot])
            )
    step.impl.do_kv_cache_update(
        step.layer, step.key, step.value, step.cache, torch.tensor([num_slots - 1])
    )
    assert torch.equal(step.cache[-1, :, -1, :32], step.key[0])


@pytest.mark.parametrize("name", ["_k_scale", "_v_scale"])
@pytest.mark.parametrize("scale", [None, torch.ones(3), torch.ones(1).double(), 1.0], ids=str)
def test_scales_of_an_fp8_cache(built, name, scale):
    step = built([1, 5], [50, 20], cache_dtype="fp8")
    step.update()
    setattr(step.layer, name, scale)
    with pytest.raises(ValueError, match=f"^layer.{name}"):
        step.attend()
    before = step.cache.clone()
    with pytest.raises(ValueError, match=f"^layer.{name}"):
        step.update()
    assert torch.equal(step.cache.view(torch.uint8), before.view(torch.uint8))


# Fields of the batch, the bad value, and the name in the error; found when built or first used.
BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"query_start_loc": torch.tensor([0.0, 1.0, 6.0])}, "query_start_loc.dtype"),
    ({"query_start_loc": torch.tensor([0, 1, 6], dtype=torch.int16)}, "query_start_loc.dtype"),
    ({"query_start_loc": torch.tensor([0, 1])}, "query_start_loc.shape"),
    ({"query_start_loc": torch.tensor([1, 2, 6])}, "query_start_loc"),
    ({"query_start_loc": torch.tensor([0, 4, 3])}, "query_start_loc"),
    ({"query_start_loc": torch.tensor([0, 1, 7])}, r"query_start_loc\[-1\]"),
    ({"seq_lens": torch.tensor([50.0, 20.0])}, "seq_lens.dtype"),
    ({"seq_lens": torch.tensor([50])}, "seq_lens.shape"),
    ({"seq_lens": torch.tensor([50, -1])}, "seq_lens"),
    ({"seq_lens": torch.tensor([50, 4])}, r"seq_lens\[1\]"),
    ({"seq_lens": torch.tensor([500, 20])}, "block_table.shape"),
    ({"seq_lens": torch.tensor([[50, 20]])}, "seq_lens.shape"),
    ({"block_table_tensor": torch.zeros(2, 4)}, "block_table_tensor.dtype"),
    ({"block_table_tensor": torch.zeros(2, 4, dtype=torch.int16)}, "block_table_tensor.dtype"),
    ({"block_table_tensor": torch.zeros(8, dtype=torch.int32)}, "block_table_tensor.shape"),
    ({"block_table_tensor": torch.zeros(1, 4, dtype=torch.int32)}, "block_table_tensor.shape"),
    ({"block_table_tensor": torch.full((2, 4), 9999, dtype=torch.int32)}, "block_table"),
    ({"block_table_tensor": torch.full((2, 4), -1, dtype=torch.int32)}, "block_table"),
    ({"causal": torch.tensor([1, 0])}, "causal.dtype"),
    ({"causal": torch.tensor([True])}, "causal.shape"),
    ({"causal": [True, False]}, "causal"),
    ({"causal": None}, "causal"),
    ({"num_reqs": -1}, "num_reqs"),
    ({"mm_req_doc_ranges": [(0, 3)]}, "mm_req_doc_ranges"),
    ({"mm_req_doc_ranges": {0: (0, 3)}}, "mm_req_doc_ranges"),
    ({"mm_req_doc_ranges": {0: [(0, 3, 5)]}}, "mm_req_doc_ranges"),
    ({"mm_req_doc_ranges": {0: [(0.5, 3)]}}, "mm_req_doc_ranges"),
    ({"mm_req_doc_ranges": {"0": [(0, 3)]}}, "mm_req_doc_ranges"),
    ({"rswa_prefix_lens": torch.tensor([3, 3])}, "rswa_prefix_lens"),
    ({"mm_req_doc_ranges": {2: [(0, 3)]}}, "mm_req_doc_ranges"),
    ({"mm_req_doc_ranges": {0: [(3, 2)]}}, "mm_req_doc_ranges"),
    ({"mm_req_doc_ranges": {0: [(0, 5), (5, 9)]}}, "mm_req_doc_ranges"),
]


@pytest.mark.parametrize(("changes", "named"), BATCHES)
def test_batches_that_do_not_fit(built, changes, named):
    step = built([1, 5], [50, 20])
    step.update()
    step.batch = step.batch.replace(**changes)
    output = step.new_output()
    with pytest.raises(ValueError, match=rf"^{named}: got .*; allowed: "):
        step.impl.forward(
            step.layer, step.query, step.key, step.value, step.cache,
            step.builder.build(0, step.batch), output,
        )  # fmt: skip
    assert output.isnan().all()


def test_a_batch_that_is_no_batch_is_named(built):
    with pytest.raises(ValueError, match=r"^common_attn_metadata: got NoneType"):
        built([1], [9]).builder.build(0, None)


def test_a_bad_encoder_length_is_refused(built):
    step = built([1, 5], [50, 20], attn_type="encoder_decoder", encoder_lens=[3, 4])
    step.batch = step.batch.replace(encoder_seq_lens=torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match=r"^encoder_seq_lens.dtype"):
        step.builder.build(0, step.batch)


def test_reference_windows_have_no_meaning_in_cross_attention(built):
    step = built(
        [1], [9], attn_type="encoder_decoder", encoder_lens=[3], rswa_window=2, rswa_prefixes=[1]
    )
    with pytest.raises(ValueError, match=r"^rswa_prefix_lens"):
        step.attend()


def test_builders_that_cannot_be():
    spec = FullAttentionSpec.for_layer(
        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    with pytest.raises(ValueError, match=r"^device"):
        attnmux.create_builder(CPUAttentionBackend, spec, ["layer"], EngineConfig(), "meta")
    for window in (0, -3):
        config = EngineConfig(model_config=ModelConfig(rswa_window=window))
        with pytest.raises(ValueError, match=r"^model_config.rswa_window"):
            attnmux.create_builder(CPUAttentionBackend, spec, ["layer"], config, "cpu")
    chunked = FullAttentionSpec.for_layer(
        block_size=16,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.float32,
        attention_chunk_size=8,
    )
    with pytest.raises(ValueError, match="attention_chunk_size"):
        attnmux.create_builder(CPUAttentionBackend, chunked, ["layer"], EngineConfig(), "cpu")
