"""`CommonAttentionMetadata`: caches, checks, padding, deprecated properties."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from attnmux.backend import CommonAttentionMetadata
from attnmux.errors import ContractError


def batch(query_lens: list[int], num_tokens: int | None = None, **fields: Any) -> Any:
    """A batch of requests that each have 10 computed tokens; fields may be replaced."""
    start = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    num_reqs = len(query_lens)
    tokens = int(start[-1]) if num_tokens is None else num_tokens
    values: dict[str, Any] = {
        "query_start_loc": start.clone(),
        "query_start_loc_cpu": start,
        "seq_lens": torch.tensor([q + 10 for q in query_lens], dtype=torch.int32),
        "num_reqs": num_reqs,
        "num_actual_tokens": tokens,
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": 10 + max(query_lens, default=0),
        "block_table_tensor": torch.arange(num_reqs * 4, dtype=torch.int32).view(num_reqs, 4),
        "slot_mapping": torch.arange(tokens),
    }
    return CommonAttentionMetadata(**values | fields)


def int32_buffer(size: int) -> torch.Tensor:
    return torch.full((size,), -7, dtype=torch.int32)


def test_lengths_of_a_batch() -> None:
    cm = batch([3, 1, 0, 2])
    assert cm.batch_size() == 4
    assert cm.naive_query_lens().tolist() == [3, 1, 0, 2]
    assert cm.compute_num_computed_tokens().tolist() == [10, 10, 10, 10]


def test_computed_tokens_are_kept() -> None:
    cm = batch([3, 1])
    first = cm.compute_num_computed_tokens()
    cm.seq_lens += 5
    assert cm.compute_num_computed_tokens() is first


def test_replace_returns_another_batch_and_leaves_this_one() -> None:
    cm = batch([3, 1])
    other = cm.replace(num_reqs=9, causal=False)
    assert (other.num_reqs, other.causal, cm.num_reqs, cm.causal) == (9, False, 2, True)
    assert other.seq_lens is cm.seq_lens
    with pytest.raises(TypeError):
        cm.replace(no_such_field=1)


@pytest.mark.parametrize(
    ("query_lens", "num_tokens", "expected"),
    [
        ([3, 1, 2], 6, [0, 0, 0, 1, 2, 2]),
        ([1, 1, 1], 3, [0, 1, 2]),
        ([2, 0, 1, 0, 0], 3, [0, 0, 2]),  # padding requests have no token
        ([2, 1], 5, [0, 0, 1, 0, 0]),  # padding tokens count as the first request's
        ([2, 3], 4, [0, 0, 1, 1]),  # more tokens mapped than asked for
        ([], 0, []),
        ([0, 0], 2, [0, 0]),
    ],
    ids=str,
)
def test_the_request_of_each_token(
    query_lens: list[int], num_tokens: int, expected: list[int]
) -> None:
    buffer = int32_buffer(8)
    indices = batch(query_lens, num_tokens).token_to_req_indices(buffer)
    assert indices.tolist() == expected
    assert indices.dtype == torch.int32
    written = max(sum(query_lens), num_tokens)
    assert buffer[written:].eq(-7).all()
    if written:
        assert indices.data_ptr() == buffer.data_ptr()


def test_the_device_decides_where_requests_end() -> None:
    # Drafts were trimmed on the device: the CPU copy is right about the total only.
    cm = batch([3, 3])
    cm.query_start_loc.copy_(torch.tensor([0, 1, 6]))
    assert cm.token_to_req_indices(int32_buffer(6)).tolist() == [0, 1, 1, 1, 1, 1]


def test_request_indices_are_built_once() -> None:
    cm = batch([3, 1, 2])
    first, second = int32_buffer(6), int32_buffer(6)
    cm.token_to_req_indices(first)
    again = cm.token_to_req_indices(second)
    assert again.data_ptr() == first.data_ptr()
    assert second.eq(-7).all()


def test_kept_request_indices_serve_fewer_tokens() -> None:
    cm = batch([3, 1, 2])
    cm.token_to_req_indices(int32_buffer(6))
    fewer = cm.replace(num_actual_tokens=4)
    assert fewer.token_to_req_indices(int32_buffer(0)).tolist() == [0, 0, 0, 1]


def kept(values: torch.Tensor) -> Any:
    return batch([3, 1, 2], _token_to_req_indices_cache=values)


@pytest.mark.parametrize(
    ("cm", "buffer", "message"),
    [
        (batch([3, 1]), int32_buffer(3), r"buffer.shape\[0\]: got 3; allowed: at least 4"),
        (batch([3, 1], 6), int32_buffer(5), r"buffer.shape\[0\]: got 5; allowed: at least 6"),
        (batch([3, 1], 2), int32_buffer(3), r"buffer.shape\[0\]: got 3; allowed: at least 4"),
        (kept(int32_buffer(6)), int32_buffer(6).to("meta"), "device: got meta; allowed: cpu"),
        (kept(int32_buffer(6).long()), int32_buffer(6), "dtype: got torch.int64"),
        (kept(int32_buffer(5)), int32_buffer(6), "num_actual_tokens: got 6; allowed: at most"),
    ],
    ids=["buffer", "padded buffer", "mapped tokens", "device", "dtype", "too few kept"],
)
@pytest.mark.parametrize("error", [ContractError, ValueError, AssertionError])
def test_request_indices_that_do_not_fit_are_refused(
    cm: Any, buffer: torch.Tensor, message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=message):
        cm.token_to_req_indices(buffer)


def test_a_refused_buffer_is_not_written() -> None:
    buffer = int32_buffer(3)
    with pytest.raises(ValueError, match="buffer"):
        batch([3, 1]).token_to_req_indices(buffer)
    assert buffer.eq(-7).all()


def padded_batch() -> Any:
    """3 requests of which the last is padding, 6 tokens of which 4 are real; every field set."""
    per_request = torch.arange(3)
    return batch(
        [3, 1, 0],
        6,
        causal=torch.tensor([True, False, True]),
        logits_indices_padded=torch.arange(5),
        num_logits_indices=5,
        max_logits_per_req=2,
        encoder_seq_lens=per_request + 1,
        encoder_seq_lens_cpu=np.arange(3) + 1,
        dcp_local_seq_lens=per_request + 2,
        dcp_local_seq_lens_cpu=per_request + 3,
        positions=torch.arange(6),
        is_prefilling=torch.tensor([True, False, False]),
        seq_lens_cpu_upper_bound=per_request + 4,
        mm_req_doc_ranges={0: [(0, 1)]},
        rswa_prefix_lens=per_request + 5,
        replayssm_decode_base_cpu=per_request + 6,
        _seq_lens_cpu=per_request + 7,
        _num_computed_tokens_cpu=per_request + 8,
        _num_computed_tokens_cache=per_request + 9,
        _token_to_req_indices_cache=int32_buffer(6),
    )


# What becomes of each field when padding is taken off: cut to requests (with one more entry for
# starts) or to tokens, kept whole, replaced by the new count, or left out.
UNPADDED = {
    "query_start_loc": "starts",
    "query_start_loc_cpu": "starts",
    "seq_lens": "requests",
    "num_reqs": "count",
    "num_actual_tokens": "count",
    "max_query_len": "kept",
    "max_seq_len": "kept",
    "block_table_tensor": "requests",
    "slot_mapping": "tokens",
    "causal": "requests",
    "logits_indices_padded": "kept",
    "num_logits_indices": "kept",
    "max_logits_per_req": "kept",
    "encoder_seq_lens": "requests",
    "encoder_seq_lens_cpu": "requests",
    "dcp_local_seq_lens": "requests",
    "dcp_local_seq_lens_cpu": "requests",
    "positions": "left out",
    "is_prefilling": "requests",
    "seq_lens_cpu_upper_bound": "left out",
    "mm_req_doc_ranges": "left out",
    "rswa_prefix_lens": "requests",
    "replayssm_decode_base_cpu": "requests",
    "_seq_lens_cpu": "requests",
    "_num_computed_tokens_cpu": "requests",
    "_num_computed_tokens_cache": "left out",
    "_token_to_req_indices_cache": "left out",
}


def test_the_table_of_unpadding_names_every_field() -> None:
    assert list(UNPADDED) == [field.name for field in dataclasses.fields(CommonAttentionMetadata)]


@pytest.mark.parametrize("field", UNPADDED)
def test_unpadding_carries_each_field_its_way(field: str) -> None:
    cm = padded_batch()
    before, after = getattr(cm, field), getattr(cm.unpadded(4, 2), field)
    match UNPADDED[field]:
        case "left out":
            assert before is not None
            assert after is None
        case "count":
            assert after == {"num_reqs": 2, "num_actual_tokens": 4}[field]
        case "kept":
            assert after is before
        case kind:
            length = {"starts": 3, "requests": 2, "tokens": 4}[kind]
            assert len(after) == length < len(before)
            assert bool((after == before[:length]).all())


def test_unpadding_leaves_absent_fields_absent() -> None:
    after = batch([3, 1, 0], 6, causal=False).unpadded(4, 2)
    assert after.causal is False
    absent = {f for f, kind in UNPADDED.items() if kind == "requests"} - {
        "seq_lens",
        "block_table_tensor",
        "causal",
    }
    assert {field for field in absent if getattr(after, field) is not None} == set()


@pytest.mark.parametrize(
    ("name", "expected"), [("seq_lens_cpu", [13, 11]), ("num_computed_tokens_cpu", [10, 10])]
)
def test_a_deprecated_property_warns_once_a_use_and_works(name: str, expected: list[int]) -> None:
    cm = batch([3, 1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = getattr(cm, name)
    assert value.tolist() == expected
    assert [warning.category for warning in caught] == [DeprecationWarning]
    assert name in str(caught[0].message)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(cm, name) is value


def test_a_deprecated_property_warns_once_from_one_place() -> None:
    cm = batch([3, 1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert cm.seq_lens_cpu.tolist() == [13, 11]
    assert len(caught) == 1


def test_deprecated_properties_prefer_what_the_engine_gave() -> None:
    given, computed = torch.tensor([1, 2]), torch.tensor([3, 4])
    cm = batch([3, 1], _seq_lens_cpu=given, _num_computed_tokens_cpu=computed)
    with pytest.warns(DeprecationWarning, match="seq_lens_cpu"):
        assert cm.seq_lens_cpu is given
    with pytest.warns(DeprecationWarning, match="num_computed_tokens_cpu"):
        assert cm.num_computed_tokens_cpu is computed
