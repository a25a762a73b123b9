"""The builder: never changes a batch, reads the device's lengths, keeps schedules for layers."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch

from attnmux.backend import AttentionCGSupport

MIXED = ([1, 1, 3, 12, 20], [1, 50, 40, 45, 20])


def _snapshot(batch):
    return {field.name: copy.deepcopy(getattr(batch, field.name)) for field in fields(batch)}


def _equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_batch_that_two_builders_share_stays_as_it_is(built):
    step = built(
        *MIXED,
        ranges={4: [(3, 9)]},
        rswa_window=3,
        rswa_prefixes=[0, 5, 5, 2, 2],
        causal=[True, False, True, False, True],
    )
    before = _snapshot(step.batch)
    other = built(*MIXED)
    step.check()
    other.builder.build(0, step.batch.replace(rswa_prefix_lens=None))
    step.builder.build_for_drafting(step.batch, draft_index=0)
    for name, value in _snapshot(step.batch).items():
        if name != "encoder_seq_lens_cpu":
            assert value is None if before[name] is None else _equal(value, before[name]), name


def test_lengths_are_read_where_the_device_has_them(built):
    # The CPU copies say something else, as when drafts are trimmed on the device.
    step = built(*MIXED)
    wrong = step.batch.query_start_loc_cpu.clone()
    wrong[1:4] = torch.tensor([2, 4, 5])
    step.batch = step.batch.replace(
        query_start_loc_cpu=wrong,
        max_query_len=1,
        max_seq_len=1,
        seq_lens_cpu_upper_bound=torch.full((5,), 60),
    )
    step.check()


def test_a_batch_smaller_than_its_tensors(built):
    # Tensors of a larger batch, of which only the first requests are in this step.
    step = built(*MIXED)
    output, lse = step.check()
    first = step.batch.replace(num_reqs=3, num_actual_tokens=5)
    metadata = step.builder.build(0, first)
    part = step.new_output()
    _, part_lse = step.impl.forward_with_lse(
        None, step.query, step.key, step.value, step.cache, metadata, part
    )
    torch.testing.assert_close(part[:5], output[:5])
    torch.testing.assert_close(part_lse[:5], lse[:5])
    assert part[5:].isnan().all()


def test_metadata_is_that_of_the_batch_at_hand(built):
    step = built([1] * 8, [20] * 8)
    step.check()
    nobody = built([0], [0])
    metadata = step.builder.build(0, nobody.batch)
    output = torch.full((2, 4, 32), 7.0)
    step.impl.forward(None, step.query[:2], None, None, step.cache, metadata, output)
    assert (output == 7.0).all()


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("requests", [1, 2, 8])
def test_a_batch_to_capture_builds(built, query_len, requests):
    step = built([query_len] * requests, [query_len] * requests)
    step.update()
    metadata = step.builder.build_for_cudagraph_capture(step.batch)
    output = step.impl.forward(
        None, step.query, step.key, step.value, step.cache, metadata, step.new_output()
    )
    step.compare(output)


def test_another_block_table_for_the_same_batch(built):
    step = built(*MIXED)
    step.update()
    metadata = step.builder.build(0, step.batch)
    arguments = (None, step.query, step.key, step.value)
    want = step.impl.forward(*arguments, step.cache, metadata, step.new_output())
    # The same rows, one block further on: in another group's blocks.
    shifted = torch.cat([step.cache[:1], step.cache])
    table = step.batch.block_table_tensor + 1
    other = step.builder.update_block_table(metadata, table, step.batch.slot_mapping + 16)
    got = step.impl.forward(*arguments, shifted, other, step.new_output())
    assert torch.equal(got, want)
    again = step.impl.forward(*arguments, step.cache, metadata, step.new_output())
    assert torch.equal(again, want)
    assert torch.equal(other.slot_mapping, step.batch.slot_mapping + 16)


def test_blocks_cut_for_the_kernel(built):
    # The engine's blocks of 16 are two of the kernel's, of which the table then speaks.
    step = built(*MIXED, block_size=8)
    step.builder.kv_cache_spec = step.builder.kv_cache_spec.copy_with_new_block_size(16)
    step.builder.set_kernel_block_size(8)
    step.check()


def test_layers_of_one_kind_share_a_schedule(built, monkeypatch):
    from attnmux_cpu import builder

    made = []
    make_schedule = builder.make_schedule
    monkeypatch.setattr(
        builder, "make_schedule", lambda *args: made.append(args) or make_schedule(*args)
    )
    step, windowed = built(*MIXED), built(*MIXED, window=4)
    step.update()
    metadata = step.builder.build(0, step.batch)
    assert not made
    for impl, schedules in ((step.impl, 1), (step.impl, 1), (windowed.impl, 2), (step.impl, 2)):
        impl.forward(
            None, step.query, step.key, step.value, step.cache, metadata, step.new_output()
        )
        assert len(made) == schedules


def test_lengths_and_tables_of_both_integer_dtypes(built):
    step = built(*MIXED)
    want = step.check()[0]
    for dtype in (torch.int32, torch.int64):
        step.batch = step.batch.replace(
            query_start_loc=step.batch.query_start_loc.to(dtype),
            seq_lens=step.batch.seq_lens.to(dtype),
            block_table_tensor=step.batch.block_table_tensor.to(dtype),
            slot_mapping=step.batch.slot_mapping.to(dtype),
        )
        assert torch.equal(step.check()[0], want)


def test_many_requests_of_one_token(built):
    count = 5000
    step = built([1] * count, [1] * count, heads=(1, 1), head_size=4, block_size=1)
    step.update()
    # Each sees itself only, with a weight of exactly 1.
    assert torch.equal(step.attend()[0], step.value)


def test_what_the_builder_declares(built):
    builder = built([1], [1]).builder
    assert builder.supports_update_block_table
    assert builder.reorder_batch_threshold is None
    support = type(builder).get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec)
    assert support is AttentionCGSupport.NEVER
    assert not builder.use_cascade_attention(0, None, 4, 2, False, False, False, 1, 1)
