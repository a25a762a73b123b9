"""What the latent builders plan: rounds of contexts, tiles of decodes, the split of the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from attnmux.backend import CommonAttentionMetadata
from attnmux.batch import make_metadata
from attnmux.config import EngineConfig, SpeculativeConfig
from attnmux.create import create_builder
from attnmux.kv_cache import MLAAttentionSpec
from attnmux_cpu.kernels.mla_decode import MIN_TILE_KV, _tiles, plan_decode
from attnmux_cpu.kernels.mla_prefill import PrefillRequest, plan_prefill
from attnmux_cpu.mla_backend import CPUMLABackend, CPUMLASparseBackend
from attnmux_cpu.options import CPUMLAOptions

BLOCK = 16


def builder(
    backend: type[CPUMLABackend] = CPUMLABackend, drafts: int = 0, context_tokens: int = 64
):
    spec = MLAAttentionSpec.for_layer(
        block_size=BLOCK, head_size=24, num_kv_heads=1, dtype=torch.float32
    )
    config = EngineConfig(speculative_config=SpeculativeConfig(drafts) if drafts else None)
    options = CPUMLAOptions(context_tokens=context_tokens)
    return create_builder(backend, spec, ["layer"], config, "cpu", options)


def batch(query_lens: list[int], seq_lens: list[int], **fields: object) -> CommonAttentionMetadata:
    tables, first = [], 0
    for seq_len in seq_lens:
        count = -(-seq_len // BLOCK)
        tables.append(list(range(first, first + count)))
        first += count
    return make_metadata(query_lens, seq_lens, tables, BLOCK, **fields)


def requests(*contexts: int, query_len: int = 1) -> list[PrefillRequest]:
    return [
        PrefillRequest(i, i * query_len, query_len, context, causal=True)
        for i, context in enumerate(contexts)
    ]


@pytest.mark.parametrize(
    ("contexts", "workspace", "num_rounds"),
    [
        # One long context beside many short ones that fit together: a single round.
        ([60_000, *[16] * 31], 65_536, 1),
        ([0, 100, 5_000], 1_024, 5),
        ([0, 0, 0], 1_024, 0),
        ([1_024], 1_024, 1),
        ([1_025], 1_024, 2),
        ([5, 5, 5], 4, 4),
    ],
)
def test_the_workspace_is_shared_by_need(
    contexts: list[int], workspace: int, num_rounds: int
) -> None:
    rounds = plan_prefill(requests(*contexts), workspace).context_rounds
    assert len(rounds) == num_rounds
    sizes = [sum(piece.end - piece.start for piece in pieces) for pieces in rounds]
    assert all(size == workspace for size in sizes[:-1])
    assert all(size <= workspace for size in sizes)


@pytest.mark.parametrize("workspace", [1, 3, 7, 1000])
def test_every_key_is_in_one_round(workspace: int) -> None:
    plan = plan_prefill(requests(0, 10, 1, 33, query_len=5), workspace)
    for rounds, lengths in ((plan.context_rounds, [0, 10, 1, 33]), (plan.own_rounds, [5] * 4)):
        seen = Counter(
            (piece.request.index, key)
            for pieces in rounds
            for piece in pieces
            for key in range(piece.start, piece.end)
        )
        assert seen == Counter((i, key) for i, n in enumerate(lengths) for key in range(n))


def test_decodes_are_planned_longest_first_and_empty_ones_left_out() -> None:
    start = torch.tensor([0, 1, 4, 4, 5, 6])
    plan = plan_decode(start, torch.tensor([3, 40, 9, 0, 7]), torch.tensor([True] * 5))
    assert plan.requests.tolist() == [1, 4, 0]
    assert plan.num_keys.tolist() == [40, 7, 3]
    assert plan.token_rows.tolist() == [[1, 2, 3], [5, 5, 5], [0, 0, 0]]
    assert plan.num_visible.tolist() == [[38, 39, 40], [7, 0, 0], [3, 0, 0]]


def test_a_query_longer_than_its_request_sees_nothing_before_position_0() -> None:
    plan = plan_decode(torch.tensor([0, 3]), torch.tensor([2]), torch.tensor([True]))
    assert plan.num_visible.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("workspace", [1, 100, 4096])
def test_tiles_cover_every_key_and_stay_within_the_workspace(workspace: int) -> None:
    num_keys = torch.tensor([5000, 700, 700, 65, 64, 1])
    covered = Counter()
    for active, start, end in _tiles(num_keys, workspace):
        assert active * (end - start) <= max(workspace, active * MIN_TILE_KV)
        covered.update({i: min(end, int(num_keys[i])) - start for i in range(active)})
    assert [covered[i] for i in range(6)] == num_keys.tolist()


@pytest.mark.parametrize(
    ("drafts", "query_lens", "split"),
    [
        (0, [1, 1, 5, 2], (2, 2, 2, 7)),
        (0, [1, 1, 1], (3, 0, 3, 0)),
        (0, [4, 9], (0, 2, 0, 13)),
        (3, [4, 1, 3, 5], (3, 1, 8, 5)),
        (7, [8, 8, 2], (3, 0, 18, 0)),
        (0, [1, 0, 6, 0], (2, 2, 1, 6)),
        (0, [0, 0], (2, 0, 0, 0)),
    ],
)
def test_metadata_tells_how_the_batch_is_split(
    drafts: int, query_lens: list[int], split: tuple[int, int, int, int]
) -> None:
    metadata = builder(drafts=drafts).build(0, batch(query_lens, [20] * len(query_lens)))
    found = (
        metadata.num_decodes,
        metadata.num_prefills,
        metadata.num_decode_tokens,
        metadata.num_prefill_tokens,
    )
    assert found == split


def test_the_threshold_follows_the_drafts() -> None:
    assert builder().reorder_batch_threshold == 1
    assert builder(drafts=4).reorder_batch_threshold == 5
    assert builder(CPUMLASparseBackend, drafts=4).reorder_batch_threshold is None


@pytest.mark.parametrize(("drafts", "query_lens"), [(0, [6, 1]), (3, [2, 9, 0, 4])])
def test_a_decode_behind_a_prefill_is_refused(drafts: int, query_lens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"common_attn_metadata: got request . of . query tokens"):
        builder(drafts=drafts).build(0, batch(query_lens, [20] * len(query_lens)))


def test_the_sparse_builder_takes_any_order_and_all_tokens_as_decodes() -> None:
    metadata = builder(CPUMLASparseBackend).build(0, batch([6, 1, 0, 2], [20, 20, 20, 2]))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (4, 9)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (0, 0)
    assert metadata.token_requests.tolist() == [0] * 6 + [1, 3, 3]
    assert metadata.num_visible.tolist() == [15, 16, 17, 18, 19, 20, 20, 1, 2]


@pytest.mark.parametrize("backend", [CPUMLABackend, CPUMLASparseBackend])
def test_another_block_table_replaces_only_table_and_slots(backend: type[CPUMLABackend]) -> None:
    step = batch([1, 5], [20, 40])
    before = builder(backend).build(0, step)
    table = step.block_table_tensor.flip(0)
    after = builder(backend).update_block_table(before, table, step.slot_mapping + 1)
    assert torch.equal(after.block_table, table.long())
    assert torch.equal(after.slot_mapping, step.slot_mapping + 1)
    assert torch.equal(before.block_table, step.block_table_tensor.long())
    assert (
        replace(after, block_table=before.block_table, slot_mapping=before.slot_mapping) == before
    )


def test_a_table_with_fewer_rows_than_the_batch_is_refused() -> None:
    built = builder().build(0, batch([1, 5], [20, 40]))
    with pytest.raises(ValueError, match=r"blk_table\.shape: got \[1, 2\]; allowed: \[2\], or"):
        builder().update_block_table(built, torch.zeros(1, 2, dtype=torch.int32), torch.zeros(6))


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("num_reqs", [1, 2, 8])
def test_dummy_batches_of_a_capture_and_of_drafting_build(query_len: int, num_reqs: int) -> None:
    step = batch([query_len] * num_reqs, [query_len] * num_reqs)
    made = builder(drafts=3)
    for metadata in (made.build_for_cudagraph_capture(step), made.build_for_drafting(step, 1)):
        assert metadata.num_decode_tokens == query_len * num_reqs
        assert metadata.num_prefills == 0


def test_metadata_is_that_of_the_batch_at_hand() -> None:
    made = builder()
    made.build(0, batch([1] * 8, [30] * 8))
    idle = made.build(0, batch([], []))
    assert (idle.num_reqs, idle.num_actual_tokens, idle.decode.requests.numel()) == (0, 0, 0)


def test_lengths_of_the_device_decide_where_a_decode_begins() -> None:
    # Drafts were trimmed on the device: 1 and 3 tokens where the host planned 2 and 2.
    step = batch([2, 2], [20, 30]).replace(query_start_loc=torch.tensor([0, 1, 4]))
    plan = builder(drafts=3).build(0, step).decode
    assert plan.token_rows.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert plan.num_visible.tolist() == [[28, 29, 30], [20, 0, 0]]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seq_lens", torch.tensor([20.0, 40.0]), "seq_lens.dtype: got torch.float32"),
        ("seq_lens", torch.tensor([20]), r"seq_lens.shape: got \[1\]; allowed: \[2\]"),
        ("query_start_loc", torch.tensor([0, 6]), r"query_start_loc.shape: got \[2\]"),
        ("block_table_tensor", torch.zeros(4).int(), r"block_table_tensor.shape: got \[4\]"),
        ("causal", torch.tensor([1, 0]), "causal.dtype: got torch.int64; allowed: torch.bool"),
    ],
)
def test_tensors_that_do_not_fit_are_named(field: str, value: torch.Tensor, message: str) -> None:
    step = batch([1, 5], [20, 40]).replace(**{field: value})
    with pytest.raises(ValueError, match=message):
        builder().build(0, step)


def test_only_the_cpu_is_served() -> None:
    spec = MLAAttentionSpec.for_layer(
        block_size=16, head_size=24, num_kv_heads=1, dtype=torch.float32
    )
    with pytest.raises(ValueError, match="device: got meta; allowed: cpu"):
        create_builder(CPUMLABackend, spec, ["layer"], EngineConfig(), "meta")
