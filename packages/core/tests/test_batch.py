"""Batches from plain lengths and tables, built without waiting for a device."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.backend import CommonAttentionMetadata
from attnmux.batch import (
    NO_SLOT,
    compute_slot_mapping,
    dcp_local_seq_lens,
    make_metadata,
    split_by_kind,
    split_decodes_and_prefills,
)

# Metadata from lengths.


def test_a_batch_from_plain_lists() -> None:
    cm = make_metadata([3, 1], [5, 20], [[4], [1, 0]], 16)
    assert cm.query_start_loc.tolist() == cm.query_start_loc_cpu.tolist() == [0, 3, 4]
    assert cm.seq_lens.tolist() == [5, 20]
    assert cm.block_table_tensor.tolist() == [[4, 0], [1, 0]]
    assert cm.slot_mapping.tolist() == [66, 67, 68, 3]
    assert (cm.num_reqs, cm.num_actual_tokens, cm.max_query_len, cm.max_seq_len) == (2, 4, 3, 20)
    assert cm.causal is True
    assert cm.seq_lens_cpu_upper_bound is not None
    assert cm.seq_lens_cpu_upper_bound.tolist() == [5, 20]
    dtypes = [cm.query_start_loc, cm.query_start_loc_cpu, cm.seq_lens, cm.block_table_tensor]
    assert {tensor.dtype for tensor in dtypes} == {torch.int32}
    assert cm.slot_mapping.dtype == torch.int64


def test_device_and_host_starts_are_apart() -> None:
    cm = make_metadata([3, 1], [5, 20], None, 16)
    cm.query_start_loc[1] = 2  # a draft trimmed on the device
    assert cm.query_start_loc_cpu.tolist() == [0, 3, 4]


def test_slots_follow_blocks_that_are_not_neighbours() -> None:
    # B45: four draft tokens over the end of block 7 into block 2.
    cm = make_metadata([4], [18], [[7, 2]], 16)
    assert cm.slot_mapping.tolist() == [7 * 16 + 14, 7 * 16 + 15, 2 * 16, 2 * 16 + 1]


def test_large_slots_need_the_block_size_of_the_spec() -> None:
    # B67: slot 75,849 is block 4,740, whatever the number of heads.
    cm = make_metadata([1], [10], [[4740]], 16)
    assert cm.slot_mapping.tolist() == [75_849]


def test_slots_do_not_overflow_32_bits() -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    assert make_metadata([1], [10], table, 16).slot_mapping.tolist() == [(2**31 - 1) * 16 + 9]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], int]:
    """Query lengths, sequence lengths, block tables without neighbours, block size."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    query_lens = draw(st.lists(st.integers(0, 20), max_size=6))
    seq_lens = [q + draw(st.integers(0, 40)) for q in query_lens]
    blocks = iter(draw(st.permutations(range(400))))
    table = [[next(blocks) for _ in range(-(-n // block_size))] for n in seq_lens]
    return query_lens, seq_lens, table, block_size


@given(batches(), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=100, deadline=None)
def test_each_new_token_has_the_slot_of_its_position(
    batch: tuple[list[int], list[int], list[list[int]], int], index_dtype: torch.dtype
) -> None:
    query_lens, seq_lens, table, block_size = batch
    expected = [
        table[req][position // block_size] * block_size + position % block_size
        for req, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(seq - query, seq)
    ]
    cm = make_metadata(query_lens, seq_lens, table, block_size)
    assert cm.slot_mapping.tolist() == expected
    again = compute_slot_mapping(
        cm.query_start_loc.to(index_dtype),
        cm.seq_lens.to(index_dtype),
        cm.block_table_tensor.to(index_dtype),
        block_size,
        sum(query_lens),
    )
    assert again.dtype == torch.int64
    assert again.tolist() == expected


@given(batches(), st.integers(0, 3), st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_padding_adds_empty_requests_and_tokens_without_a_slot(
    batch: tuple[list[int], list[int], list[list[int]], int], more_reqs: int, more_tokens: int
) -> None:
    query_lens, seq_lens, table, block_size = batch
    reqs, tokens = len(query_lens), sum(query_lens)
    plain = make_metadata(query_lens, seq_lens, table, block_size)
    cm = make_metadata(
        query_lens,
        seq_lens,
        table,
        block_size,
        pad_num_reqs=reqs + more_reqs,
        pad_num_tokens=tokens + more_tokens,
    )
    assert (cm.num_reqs, cm.num_actual_tokens) == (reqs + more_reqs, tokens + more_tokens)
    assert cm.naive_query_lens().tolist() == query_lens + [0] * more_reqs
    assert cm.seq_lens.tolist() == seq_lens + [0] * more_reqs
    assert cm.slot_mapping[tokens:].eq(NO_SLOT).all()
    assert cm.block_table_tensor.shape[0] == cm.batch_size() == reqs + more_reqs
    unpadded = cm.unpadded(tokens, reqs)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        assert torch.equal(getattr(unpadded, name), getattr(plain, name))


def test_a_step_without_requests_is_a_batch_of_its_own() -> None:
    # B78: an idle step must not show the batch before it.
    make_metadata([1] * 8, [4] * 8, [[0]] * 8, 16)
    cm = make_metadata([], [], [], 16)
    assert (cm.num_reqs, cm.num_actual_tokens, cm.max_query_len, cm.max_seq_len) == (0, 0, 0, 0)
    assert cm.query_start_loc.tolist() == [0]
    assert cm.batch_size() == 0
    assert cm.slot_mapping.numel() == 0
    assert split_decodes_and_prefills(cm) == (0, 0, 0, 0)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("num_reqs", [1, 2, 8])
def test_a_uniform_batch_for_capture_has_all_its_tokens(query_len: int, num_reqs: int) -> None:
    # B79.
    cm = make_metadata([query_len] * num_reqs, [64] * num_reqs, [[0] * 4] * num_reqs, 16)
    assert cm.num_actual_tokens == query_len * num_reqs == cm.slot_mapping.shape[0]
    split = split_decodes_and_prefills(cm, decode_threshold=4, require_uniform=True)
    assert split == (num_reqs, 0, query_len * num_reqs, 0)


def test_without_a_cache_nothing_has_a_slot() -> None:
    cm = make_metadata([3, 2], [3, 2], None, 16, causal=False)
    assert cm.block_table_tensor.shape == (2, 0)
    assert cm.slot_mapping.tolist() == [NO_SLOT] * 5
    assert cm.causal is False


def test_the_table_of_cross_attention_is_of_the_encoders_tokens() -> None:
    encoder_lens = torch.tensor([5, 0], dtype=torch.int32)
    cm = make_metadata(
        [2, 40],
        [40, 40],
        [[3], []],
        16,
        encoder_seq_lens=encoder_lens,
        encoder_seq_lens_cpu=encoder_lens.numpy(),
    )
    assert cm.encoder_seq_lens is encoder_lens
    assert cm.slot_mapping.eq(NO_SLOT).all()
    with pytest.raises(ValueError, match=r"block_table\[0\]: got 1 blocks; allowed: at least 2"):
        make_metadata(
            [1],
            [4],
            [[3]],
            16,
            encoder_seq_lens=torch.tensor([17]),
            encoder_seq_lens_cpu=np.array([17]),
        )


def test_blocks_freed_behind_a_window_may_be_named_by_anything() -> None:
    cm = make_metadata([1], [40], [[-1, -1, 5]], 16)
    assert cm.slot_mapping.tolist() == [5 * 16 + 7]


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("causal", True),
        ("is_prefilling", False),
        ("encoder_seq_lens", 0),
        ("rswa_prefix_lens", 0),
        ("dcp_local_seq_lens", 0),
    ],
)
def test_what_is_given_for_each_request_is_padded_with_the_requests(
    name: str, padding: object
) -> None:
    given = torch.tensor([False, True]) if isinstance(padding, bool) else torch.tensor([3, 4])
    cm = make_metadata([1, 2], [5, 6], None, 16, pad_num_reqs=4, **{name: given})
    assert getattr(cm, name).tolist() == [*given.tolist(), padding, padding]
    whole = make_metadata([1, 2], [5, 6], None, 16, **{name: given})
    assert getattr(whole, name) is given or name == "causal"


def test_further_fields_are_carried() -> None:
    prefilling = torch.tensor([True])
    cm = make_metadata(
        [1], [1], [[0]], 16, is_prefilling=prefilling, mm_req_doc_ranges={0: [(0, 0)]}
    )
    assert cm.is_prefilling is prefilling
    assert cm.mm_req_doc_ranges == {0: [(0, 0)]}
    with pytest.raises(TypeError, match="no_such_field"):
        make_metadata([1], [1], [[0]], 16, no_such_field=1)


def test_given_slots_and_tensors_are_used_as_they_are() -> None:
    table = torch.tensor([[9, 8]])
    seq_lens, slots = torch.tensor([20]), torch.tensor([5, -1, 77])
    cm = make_metadata([2], seq_lens, table, 16, slot_mapping=slots)
    assert cm.block_table_tensor is table
    assert cm.seq_lens is seq_lens
    assert cm.slot_mapping is slots


@pytest.mark.parametrize("pad", [{}, {"pad_num_reqs": 5, "pad_num_tokens": 9}], ids=["", "padded"])
def test_inputs_are_never_changed(pad: dict[str, int]) -> None:
    # B42.
    arguments = {
        "query_lens": np.array([1, 2]),
        "seq_lens": torch.tensor([20, 3]),
        "block_table": torch.tensor([[9, 8], [1, 0]], dtype=torch.int32),
        "slot_mapping": torch.tensor([5, 6, 7]),
    }
    before = copy.deepcopy(arguments)
    cm = make_metadata(block_size=16, **arguments, **pad)  # type: ignore[arg-type]
    values = copy.deepcopy(vars(cm))
    split_decodes_and_prefills(cm)
    split_by_kind(cm)
    dcp_local_seq_lens(cm.seq_lens, 2, 1)
    cm.unpadded(3, 2)
    for name, value in before.items():
        assert np.array_equal(np.asarray(value), np.asarray(arguments[name]))
    for name, value in values.items():
        now = getattr(cm, name)
        assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value


GOOD: dict[str, Any] = {
    "query_lens": [3, 1],
    "seq_lens": [5, 20],
    "block_table": [[4], [1, 0]],
    "block_size": 16,
}
ON_DEVICE = {
    "seq_lens": torch.zeros(2, dtype=torch.int32, device="meta"),
    "block_table": torch.zeros(2, 4, dtype=torch.int32, device="meta"),
    "device": "meta",
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative query": ({"query_lens": [3, -1]}, r"query_lens: got \[3, -1\]"),
    "query of no number": ({"query_lens": [3, 1.5]}, r"query_lens: got \[3, 1.5\]; .*integers"),
    "queries in two dimensions": ({"query_lens": [[3, 1]]}, "query_lens: got"),
    "another number of lengths": ({"seq_lens": [5]}, "seq_lens: got 1 lengths; allowed: 2"),
    "shorter than the query": (
        {"seq_lens": [5, 0]},
        r"seq_lens\[1\]: got 0; allowed: at least its 1 query tokens",
    ),
    "length of no number": ({"seq_lens": [5.0, 20.0]}, "seq_lens: got .*integers"),
    "lengths of int16": ({"seq_lens": torch.tensor([5, 20]).short()}, "seq_lens.dtype: got"),
    "lengths of float": ({"seq_lens": torch.tensor([5.0, 20.0])}, "seq_lens: got"),
    "row too short": (
        {"block_table": [[4], [1]]},
        r"block_table\[1\]: got 1 blocks; allowed: at least 2 for 20 tokens in blocks of 16",
    ),
    "table too narrow": (
        {"block_table": torch.tensor([[4], [1]])},
        r"block_table\[1\]: got 1 blocks; allowed: at least 2",
    ),
    "another number of rows": ({"block_table": [[4, 5]]}, r"block_table: got \[1, 2\]"),
    "rows of a tensor": ({"block_table": torch.zeros(3, 2).int()}, r"block_table: got \[3, 2\]"),
    "table of int16": ({"block_table": torch.zeros(2, 2).short()}, "block_table.dtype: got"),
    "table of one dimension": ({"block_table": torch.zeros(2).int()}, r"block_table: got \[2\]"),
    "queries that are ragged": ({"query_lens": [[3], [1, 2]]}, "query_lens: got .*integers"),
    "a number for the queries": ({"query_lens": 3}, "query_lens: got 3"),
    "queries on a device": (
        {"query_lens": torch.zeros(2, dtype=torch.int64, device="meta")},
        "query_lens: got a tensor on meta",
    ),
    "no lengths": ({"seq_lens": None}, "seq_lens: got"),
    "lengths in two dimensions": ({"seq_lens": [[5], [20]]}, r"seq_lens: got shape \[2, 1\]"),
    "lengths past int32": ({"seq_lens": [5, 2**31]}, "seq_lens: got 2147483648; allowed: at most"),
    "queries past int32": ({"query_lens": [3, 2**31]}, "query_lens: got .*together"),
    "table without rows": ({"block_table": [4, 1]}, r"block_table\[0\]: got 4; allowed: a row"),
    "table of text": ({"block_table": "41"}, "block_table: got '41'"),
    "block of no number": ({"block_table": [[4], [1.5, 0]]}, "block_table: got .*integers"),
    "block past int32": ({"block_table": [[2**40], [1, 0]]}, r"block_table\[0\]: got"),
    "negative block of a new token": ({"block_table": [[-1], [1, 0]]}, "block_table: got"),
    "bound below the lengths": ({"max_seq_len": 19}, "max_seq_len: got 19; allowed: at least 20"),
    "padding of no number": ({"pad_num_reqs": 2.5}, "pad_num_reqs: got 2.5"),
    "slots as a list": ({"slot_mapping": [1, 2, 3, 4]}, "slot_mapping: got list"),
    "causal as text": ({"causal": "no"}, "causal: got str"),
    "causal of too few": ({"causal": torch.tensor([True])}, r"causal.shape: got \[1\]"),
    "causal of integers": ({"causal": torch.tensor([1, 0])}, "causal.dtype: got"),
    "prefixes as a list": ({"rswa_prefix_lens": [3, 4]}, "rswa_prefix_lens: got list"),
    "prefixes of too few": (
        {"rswa_prefix_lens": torch.tensor([3])},
        r"rswa_prefix_lens.shape: got \[1\]; allowed: \[2\]",
    ),
    "no block size": ({"block_size": 0}, "block_size: got 0"),
    "padding below the requests": ({"pad_num_reqs": 1}, "pad_num_reqs: got 1; allowed: at least 2"),
    "padding below the tokens": ({"pad_num_tokens": 3}, "pad_num_tokens: got 3; .*at least 4"),
    "slots of float": ({"slot_mapping": torch.zeros(4)}, "slot_mapping.dtype: got"),
    "no bound for device lengths": (ON_DEVICE, "max_seq_len: got None; allowed: an upper bound"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_batch_that_makes_no_sense_is_refused(case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make_metadata(**GOOD | change)


# Devices: a meta tensor has no values, so that whatever reads one back raises.


def test_a_batch_on_a_device_is_built_without_reading_it() -> None:
    # B125: lengths are known on the device only, and an upper bound on the host.
    cm = make_metadata(
        [3, 1], max_seq_len=4096, block_size=16, pad_num_reqs=4, pad_num_tokens=8, **ON_DEVICE
    )
    assert cm.max_seq_len == 4096
    assert cm.seq_lens_cpu_upper_bound is None
    on_device = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    assert {getattr(cm, name).device.type for name in on_device} == {"meta"}
    assert cm.slot_mapping.shape == (8,)
    assert cm.query_start_loc_cpu.tolist() == [0, 3, 4, 4, 4]


def test_nothing_waits_for_a_device() -> None:
    # B126.
    cm = make_metadata([1, 3], max_seq_len=64, block_size=16, **ON_DEVICE)
    assert split_decodes_and_prefills(cm) == (1, 1, 1, 3)
    assert dcp_local_seq_lens(cm.seq_lens, 4, 1).device.type == "meta"
    assert cm.compute_num_computed_tokens().shape == (2,)
    buffer = torch.empty(8, dtype=torch.int32, device="meta")
    assert cm.token_to_req_indices(buffer).shape == (4,)
    assert cm.unpadded(4, 2).seq_lens.device.type == "meta"
    assert cm.replace(causal=False).seq_lens is cm.seq_lens


def test_the_check_on_waiting_can_fail() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        ON_DEVICE["seq_lens"].max().item()


def test_the_batch_is_the_contracts_own_type() -> None:
    assert type(make_metadata([1], [1], None, 16)) is CommonAttentionMetadata
