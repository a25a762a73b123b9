"""Order and split of a batch, and the lengths that context-parallel ranks keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.batch import (
    BatchSplit,
    RequestKind,
    classify_requests,
    dcp_local_seq_lens,
    make_metadata,
    reorder_batch,
    split_by_kind,
    split_decodes_and_prefills,
)

D, S, L, P = RequestKind
ON_DEVICE = torch.zeros(2, dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("query", "computed", "prefilling", "kind"),
    [
        (1, 40, False, D),
        (4, 40, False, D),
        (1, 40, True, S),
        (4, 40, True, S),
        (5, 40, True, L),
        (5, 40, False, L),
        (5, 0, True, P),
        (5, 0, False, P),
        (1, 0, True, P),  # the first token of a prompt of one token
        (0, 0, False, D),  # a request that only fills a place
        (0, 40, False, D),
    ],
)
def test_what_a_step_does_for_a_request(
    query: int, computed: int, prefilling: bool, kind: RequestKind
) -> None:
    kinds = classify_requests([query], [computed], [prefilling], decode_threshold=4)
    assert kinds.tolist() == [kind]


def test_without_word_of_prompts_few_tokens_are_a_decode() -> None:
    assert classify_requests([1, 2, 1], [9, 9, 0]).tolist() == [D, L, P]


def naive_kind(query: int, computed: int, prefilling: bool, threshold: int) -> RequestKind:
    if query == 0 and not prefilling:
        return D
    if computed == 0:
        return P
    if query > threshold:
        return L
    return S if prefilling else D


def request_lists(shortest_query: int) -> st.SearchStrategy[list[tuple[int, int, bool]]]:
    request = st.tuples(st.integers(shortest_query, 9), st.integers(0, 9), st.booleans())
    return st.lists(request, max_size=12)


@given(request_lists(shortest_query=0), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_a_reordered_batch_is_sorted_and_a_permutation(
    batch: list[tuple[int, int, bool]], threshold: int
) -> None:
    query, computed, prefilling = ([r[i] for r in batch] for i in range(3))
    kinds = classify_requests(query, computed, prefilling, threshold)
    assert kinds.tolist() == [naive_kind(*request, threshold) for request in batch]
    order = reorder_batch(kinds)
    assert sorted(order.tolist()) == list(range(len(batch)))
    # Sorted by kind, and by old place inside a kind.
    keys = [(kinds[old], old) for old in order]
    assert keys == sorted(keys)


@given(request_lists(shortest_query=1), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_a_sorted_batch_is_split_by_kind(
    batch: list[tuple[int, int, bool]], threshold: int
) -> None:
    query, computed, prefilling = (np.array([r[i] for r in batch], dtype=int) for i in range(3))
    order = reorder_batch(classify_requests(query, computed, prefilling, threshold))
    query, computed, prefilling = query[order], computed[order], prefilling[order]
    cm = make_metadata(
        query, query + computed, None, 16, is_prefilling=torch.from_numpy(prefilling.astype(bool))
    )
    kinds = [naive_kind(*request, threshold) for request in batch]
    split = split_by_kind(cm, threshold)
    assert split.num_reqs == tuple(kinds.count(kind) for kind in RequestKind)
    assert split.num_tokens == tuple(
        sum(request[0] for request, k in zip(batch, kinds, strict=True) if k == kind)
        for kind in RequestKind
    )


@pytest.mark.parametrize(
    ("query_lens", "expected"),
    [
        ([1, 4, 0, 0], (1, 0, 0, 3)),  # after a prefill
        ([1, 1, 0, 0], (4, 0, 0, 0)),  # after decodes
        ([0, 0], (2, 0, 0, 0)),
        ([], (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_padding_goes_with_the_last_kind(query_lens: list[int], expected: tuple[int, ...]) -> None:
    seq_lens = [4 if query == 4 else 9 * query for query in query_lens]
    split = split_by_kind(make_metadata(query_lens, seq_lens, None, 16))
    assert split.num_reqs == expected
    assert sum(split.num_tokens) == sum(query_lens)


def test_a_batch_that_is_not_sorted_is_named() -> None:
    cm = make_metadata([5, 1], [5, 9], None, 16)
    with pytest.raises(ValueError, match=r"order \['PREFILL', 'DECODE'\]; allowed: decodes, short"):
        split_by_kind(cm)
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound: got None"):
        split_by_kind(cm.replace(seq_lens_cpu_upper_bound=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0]), "got 1 and 2 requests; allowed: 2"),
        (([1], [0], [True, False]), "got 1 and 2 requests; allowed: 1"),
        (([1], [0], None, 0), "decode_threshold: got 0"),
        (([-1], [0]), "query_lens: got"),
        (([1.5], [0]), "query_lens: got .*integers"),
        ((ON_DEVICE, [0, 0]), "query_lens: got a tensor on meta; allowed: .*host"),
        (([1, 1], ON_DEVICE), "num_computed_tokens: got a tensor on meta"),
        (([1, 1], [0, 0], ON_DEVICE), "is_prefilling: got a tensor on meta"),
    ],
    ids=["computed", "prefilling", "threshold", "negative", "float", "meta 1", "meta 2", "meta 3"],
)
def test_requests_that_cannot_be_classified_are_refused(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        classify_requests(*arguments)


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "expected"),
    [
        ([1, 1, 5, 9], 1, False, (2, 2, 2, 14)),
        ([1, 1, 1], 1, False, (3, 0, 3, 0)),
        ([5, 9], 1, False, (0, 2, 0, 14)),
        ([1, 5, 1], 1, False, (1, 2, 1, 6)),  # what follows a prefill counts as one
        ([2, 1, 3, 9], 3, False, (3, 1, 6, 9)),
        ([2, 1, 3, 9], 3, True, (1, 3, 2, 13)),
        ([2, 2, 2], 3, True, (3, 0, 6, 0)),
        ([4, 4], 3, True, (0, 2, 0, 8)),
        ([1, 1, 0, 0], 1, False, (4, 0, 2, 0)),  # padding after decodes
        ([2, 2, 0, 0], 2, True, (4, 0, 4, 0)),
        ([1, 5, 0], 1, False, (1, 2, 1, 5)),
        ([], 1, False, (0, 0, 0, 0)),
        ([], 1, True, (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_where_the_decodes_end(
    query_lens: list[int], threshold: int, uniform: bool, expected: tuple[int, ...]
) -> None:
    cm = make_metadata(query_lens, query_lens, None, 16)
    assert split_decodes_and_prefills(cm, threshold, uniform) == BatchSplit(*expected)


def test_tokens_of_padding_go_with_the_last_part() -> None:
    decodes = make_metadata([1, 1], [9, 9], None, 16, pad_num_tokens=8)
    assert split_decodes_and_prefills(decodes) == (2, 0, 8, 0)
    mixed = make_metadata([1, 5], [9, 9], None, 16, pad_num_tokens=8)
    assert split_decodes_and_prefills(mixed) == (1, 1, 1, 7)


@given(st.lists(st.integers(0, 6), max_size=10), st.integers(1, 6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_split_is_the_longest_run_of_decodes(
    query_lens: list[int], threshold: int, uniform: bool
) -> None:
    cm = make_metadata(query_lens, query_lens, None, 16)
    split = split_decodes_and_prefills(cm, threshold, uniform)
    expected = 0
    for query in query_lens:
        fits = query <= threshold and (not uniform or query in (0, query_lens[0]))
        if not fits:
            break
        expected += 1
    assert split.num_decodes == expected
    assert split.num_decodes + split.num_prefills == len(query_lens)
    assert split.num_decode_tokens == sum(query_lens[:expected])
    assert split.num_decode_tokens + split.num_prefill_tokens == sum(query_lens)


# Context parallelism.


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_token_has_one_owner(ranks: int, interleave: int) -> None:
    # B34, every length to 400.
    lengths = torch.arange(401)
    owner = lengths // interleave % ranks  # of the token at each position
    total = torch.zeros_like(lengths)
    for rank in range(ranks):
        local = dcp_local_seq_lens(lengths, ranks, rank, interleave)
        owned = torch.cat([torch.zeros(1).long(), (owner == rank).long().cumsum(0)[:-1]])
        assert torch.equal(local, owned)
        total += local
    assert torch.equal(total, lengths)


def test_local_lengths_of_several_query_tokens_are_not_neighbours() -> None:
    # B33: tokens that see 8, 9 and 10 keys, on rank 1 of 2.
    visible = torch.tensor([8, 9, 10])
    assert dcp_local_seq_lens(visible, 2, 1).tolist() == [4, 4, 5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_local_lengths_keep_shape_and_dtype(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[0, 7], [16, 100]], dtype=dtype)
    local = dcp_local_seq_lens(lengths, 4, 3, 2)
    assert (local.shape, local.dtype) == ((2, 2), dtype)
    assert local.tolist() == [[0, 1], [4, 24]]


def test_lengths_of_ranks_are_integers() -> None:
    with pytest.raises(ValueError, match="seq_lens: got list"):
        dcp_local_seq_lens([4], 2, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seq_lens.dtype: got"):
        dcp_local_seq_lens(torch.tensor([4.5]), 2, 0)
    with pytest.raises(ValueError, match="dcp_rank: got None"):
        dcp_local_seq_lens(torch.tensor([4]), 2, None)  # type: ignore[arg-type]


def test_a_threshold_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="decode_threshold: got 0"):
        split_decodes_and_prefills(make_metadata([1], [4], None, 16), decode_threshold=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "dcp_world_size: got 0"),
        ((2, 2), "dcp_rank: got 2; allowed: 0 to 1"),
        ((2, -1), "dcp_rank: got -1"),
        ((2, 0, 0), "interleave: got 0"),
    ],
    ids=str,
)
def test_ranks_that_do_not_exist_have_no_lengths(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dcp_local_seq_lens(torch.tensor([4]), *arguments)
