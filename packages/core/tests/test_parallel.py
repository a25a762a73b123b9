"""Context-parallel groups and merges by log-sum-exp, in one process and in worlds of 2 and 4."""

from __future__ import annotations

import itertools
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from attnmux.errors import ContractError
from attnmux.parallel import (
    ContextParallelGroup,
    context_parallel_place,
    destroy_context_parallel,
    get_dcp_group,
    get_pcp_group,
    init_context_parallel,
    merge_across_ranks,
    merge_attn_states,
    merge_states,
    use_context_parallel_groups,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORKER = Path(__file__).with_name("rank_worker.py")
NUM_TOKENS, NUM_HEADS, HEAD_SIZE = 5, 4, 16

State = tuple[torch.Tensor, torch.Tensor]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> State:
    """float64 attention of ``[T, H, D]`` over ``[n, H, D]`` and its natural log-sum-exp."""
    scores = torch.einsum("thd,nhd->thn", query, key)
    if key.shape[0] == 0:
        return torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf, dtype=query.dtype)
    return torch.einsum("thn,nhd->thd", scores.softmax(-1), value), scores.logsumexp(-1)


def problem(num_keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_keys)
    shapes = ((NUM_TOKENS, NUM_HEADS, HEAD_SIZE), *[(num_keys, NUM_HEADS, HEAD_SIZE)] * 2)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return query, key, value


def stored(state: State, dtype: torch.dtype) -> State:
    """As a kernel returns it: output in ``dtype`` (garbage where empty), lse in float32."""
    out, lse = state[0].to(dtype), state[1].float()
    return out.masked_fill(torch.isneginf(lse).unsqueeze(-1), torch.nan), lse


def assert_close(got: State, expected: State, dtype: torch.dtype) -> None:
    """Partial outputs and the result are rounded once each to ``dtype``; sums are float32."""
    scale = expected[0].abs().max().item()
    tolerance = 1.5 * torch.finfo(dtype).eps * scale + 16 * torch.finfo(torch.float32).eps * scale
    torch.testing.assert_close(got[0].double(), expected[0].double(), rtol=0, atol=tolerance)
    torch.testing.assert_close(got[1].double(), expected[1].double(), rtol=1e-6, atol=2e-6)


def random_state(seed: int, dtype: torch.dtype) -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(64, NUM_HEADS, HEAD_SIZE, generator=generator).to(dtype)
    return out, torch.randn(64, NUM_HEADS, generator=generator) * 4


# Merges in one process.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(), (9,), (0, 9), (4, 4, 4, 11), (1, 2, 3, 4, 5, 6, 17)], ids=str)
def test_merging_parts_of_the_keys_equals_attention_over_all(
    cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    query, key, value = problem(17)
    edges = [0, *cuts, 17]
    parts = [
        stored(attention(query, key[a:b], value[a:b]), dtype) for a, b in itertools.pairwise(edges)
    ]
    got = merge_states([out for out, _ in parts], [lse for _, lse in parts])
    assert got[0].dtype == dtype
    assert_close(got, attention(query, key, value), dtype)


@pytest.mark.parametrize("length", range(1, 8))
def test_ranks_without_keys_do_not_outweigh_the_others(length: int) -> None:
    # B35: eight ranks, fewer keys than ranks; key i stands on rank i.
    query, key, value = problem(length)
    parts = [stored(attention(query, key[r::8], value[r::8]), torch.float32) for r in range(8)]
    got = merge_states([out for out, _ in parts], [lse for _, lse in parts])
    assert_close(got, attention(query, key, value), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairwise_merge_with_empty_sides(dtype: torch.dtype) -> None:
    # B24: a quarter of the rows is empty on both sides, a quarter on one.
    (out_a, lse_a), (out_b, lse_b) = random_state(1, dtype), random_state(2, dtype)
    lse_a[:16] = lse_b[:32] = -torch.inf
    out_a[:16] = torch.nan
    out_b[:32] = torch.nan
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[:16], torch.zeros_like(out[:16]))
    assert torch.isneginf(lse[:16]).all()
    assert torch.equal(out[16:32], out_a[16:32])
    assert torch.equal(lse[16:32], lse_a[16:32])
    assert torch.isfinite(out[32:]).all()
    expected = torch.logaddexp(lse_a[32:].double(), lse_b[32:].double()).float()
    torch.testing.assert_close(lse[32:], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("base_on_e", [True, False])
@pytest.mark.parametrize("num_states", [1, 2, 7])
def test_only_empty_states_give_the_neutral_element(num_states: int, base_on_e: bool) -> None:
    # B25.
    outs = torch.full((num_states, 3, 2, 8), torch.nan)
    lses = torch.full((num_states, 3, 2), -torch.inf)
    out, lse = merge_states(outs, lses, base_on_e=base_on_e)
    assert torch.equal(out, torch.zeros(3, 2, 8))
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("base_on_e", [True, False])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_one_state_among_empty_ones_is_unchanged(place: int, base_on_e: bool) -> None:
    # B25, all but one.
    out, lse = random_state(3, torch.float32)
    outs = torch.full((7, *out.shape), torch.nan)
    lses = torch.full((7, *lse.shape), -torch.inf)
    outs[place], lses[place] = out, lse
    got = merge_states(outs, lses, base_on_e=base_on_e)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)


def test_positive_infinity_is_read_as_empty() -> None:
    (out_a, lse_a), (out_b, _) = random_state(4, torch.float32), random_state(5, torch.float32)
    out, lse = merge_attn_states(out_a, lse_a, out_b, torch.full_like(lse_a, torch.inf))
    assert torch.equal(out, out_a)
    assert torch.equal(lse, lse_a)


def test_a_nan_of_a_state_that_has_keys_stays_visible() -> None:
    (out_a, lse_a), (out_b, lse_b) = random_state(6, torch.float32), random_state(7, torch.float32)
    lse_b[3, 1] = torch.nan
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert torch.isnan(out[3, 1]).all()
    assert torch.isnan(lse[3, 1])
    assert torch.isnan(lse).sum() == 1


def test_each_side_has_strides_of_its_own() -> None:
    # Value head 16 stored with stride 24 beside a contiguous one; one lse stored head-major.
    (out_a, lse_a), (out_b, lse_b) = random_state(8, torch.float32), random_state(9, torch.float32)
    expected = merge_attn_states(out_a, lse_a, out_b, lse_b)
    padded = torch.full((64, NUM_HEADS, 24), torch.nan)
    padded[..., :HEAD_SIZE] = out_b
    head_major = lse_b.t().contiguous().t()
    assert head_major.stride() != lse_b.stride()
    got = merge_attn_states(out_a, lse_a, padded[..., :HEAD_SIZE], head_major)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_inputs_are_not_changed() -> None:
    (out_a, lse_a), (out_b, lse_b) = (
        random_state(10, torch.float32),
        random_state(11, torch.float32),
    )
    lse_b[:4] = torch.inf
    before = [t.clone() for t in (out_a, lse_a, out_b, lse_b)]
    merge_attn_states(out_a, lse_a, out_b, lse_b)
    for tensor, copy in zip((out_a, lse_a, out_b, lse_b), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("size", [-3e4, -90.0, 90.0, 3e4])
def test_log_sum_exps_of_any_size_neither_overflow_nor_vanish(size: float) -> None:
    (out_a, lse_a), (out_b, lse_b) = (
        random_state(12, torch.float32),
        random_state(13, torch.float32),
    )
    expected = merge_attn_states(out_a, lse_a, out_b, lse_b)
    out, lse = merge_attn_states(out_a, lse_a + size, out_b, lse_b + size)
    # Adding the offset rounds the inputs themselves to float32 steps of its size.
    step = abs(size) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(out, expected[0], rtol=0, atol=8 * step + 1e-6)
    torch.testing.assert_close(lse, expected[1] + size, rtol=0, atol=4 * step + 1e-6)


def test_base_two_is_the_same_merge_in_other_units() -> None:
    (out_a, lse_a), (out_b, lse_b) = (
        random_state(14, torch.float32),
        random_state(15, torch.float32),
    )
    expected = merge_attn_states(out_a, lse_a, out_b, lse_b)
    to_base_2 = 1 / math.log(2)
    out, lse = merge_attn_states(
        out_a, lse_a * to_base_2, out_b, lse_b * to_base_2, base_on_e=(False, False)
    )
    torch.testing.assert_close(out, expected[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(lse * math.log(2), expected[1], rtol=1e-6, atol=1e-5)
    wrong, _ = merge_attn_states(out_a, lse_a * to_base_2, out_b, lse_b * to_base_2)
    assert (wrong - expected[0]).abs().max() > 0.01, "the base must matter to this test"


BAD_MERGES = {
    "no state": ([], [], True, "outs, lses: got 0 and 0 states"),
    "counts differ": (["f"], ["f", "f"], True, "outs, lses: got 1 and 2 states"),
    "mixed bases": (["f", "f"], ["f", "f"], (True, False), r"base_on_e: got \[True, False\]"),
    "bases too few": (["f", "f"], ["f", "f"], (True,), r"base_on_e: got \[True\]"),
    "lse dtype": (["f"], ["h"], True, r"lses\[0\].dtype: got torch.float16"),
    "output dtypes differ": (["f", "h"], ["f", "f"], True, r"outs\[1\].dtype: got torch.float16"),
    "output dtype": (["i"], ["f"], True, r"outs\[0\].dtype: got torch.int32"),
    "lse shape": (["f"], ["T"], True, r"lses\[0\].shape: got \[64, 16, 4\]"),
    "devices differ": (["f", "m"], ["f", "f"], True, r"outs\[1\].device: got meta"),
}


@pytest.mark.parametrize("case", BAD_MERGES)
def test_states_that_do_not_fit_are_refused(case: str) -> None:
    out, lse = random_state(16, torch.float32)
    outs = {"f": out, "h": out.half(), "i": out.int(), "m": out.to("meta")}
    lses = {"f": lse, "h": lse.half(), "T": out.transpose(1, 2)}
    out_names, lse_names, base, message = BAD_MERGES[case]
    with pytest.raises(ValueError, match=message):
        merge_states([outs[n] for n in out_names], [lses[n] for n in lse_names], base_on_e=base)


def test_a_merge_never_reads_a_value_back() -> None:
    # A meta tensor has no values: whatever asks for one raises.
    out = torch.empty(3, 7, 4, 8, dtype=torch.bfloat16, device="meta")
    got = merge_states(out, torch.empty(3, 7, 4, device="meta"))
    assert got[0].shape == (7, 4, 8)
    assert got[0].dtype == torch.bfloat16
    assert got[1].shape == (7, 4)


# Groups in one process.


@pytest.fixture
def no_groups() -> Iterator[None]:
    destroy_context_parallel()
    yield
    destroy_context_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("get", [get_dcp_group, get_pcp_group])
@pytest.mark.parametrize("error", [ContractError, ValueError, AssertionError])
def test_a_group_that_was_not_made_is_an_error(get: object, error: type[Exception]) -> None:
    assert callable(get)
    with pytest.raises(error, match="allowed: one made by init_context_parallel"):
        get()


@pytest.mark.usefixtures("no_groups")
def test_a_single_process_needs_no_world() -> None:
    assert context_parallel_place("dcp") == context_parallel_place("pcp") == (1, 0)
    init_context_parallel(1)
    assert not dist.is_initialized()
    assert (get_dcp_group().world_size, get_pcp_group().rank_in_group) == (1, 0)
    with pytest.raises(ContractError, match="second initialisation"):
        init_context_parallel(1)
    destroy_context_parallel()
    destroy_context_parallel()
    with pytest.raises(ContractError):
        get_dcp_group()


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dcp_size": 0}, "dcp_size: got 0"),
        ({"dcp_size": 1, "pcp_size": -1}, "pcp_size: got -1"),
        ({"dcp_size": 2}, "dcp_size: got 2; allowed: a divisor of tensor_parallel_size = 1"),
        ({"dcp_size": 1, "pcp_size": 3}, "pcp_size: got 3; allowed: a divisor of the world's 1"),
        ({"dcp_size": 1, "tensor_parallel_size": 4}, "tensor_parallel_size: got 4"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_divide_the_world_are_refused(
    arguments: dict[str, int], message: str
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=message):
        init_context_parallel(**arguments)
    with pytest.raises(ContractError):
        get_dcp_group()


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_its_group_is_refused(world_size: int, rank: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ContextParallelGroup(world_size, rank)


@pytest.mark.usefixtures("no_groups")
def test_given_groups_hold_inside_their_block_only() -> None:
    outer = ContextParallelGroup(4, 2)
    with use_context_parallel_groups(dcp=outer):
        assert get_dcp_group() is outer
        assert context_parallel_place("dcp") == (4, 2)
        assert context_parallel_place("pcp") == (1, 0)
        with use_context_parallel_groups(pcp=outer):
            assert context_parallel_place("pcp") == (4, 2)
            assert context_parallel_place("dcp") == (1, 0)
        assert get_dcp_group() is outer
        seen: list[tuple[int, int]] = []
        thread = threading.Thread(target=lambda: seen.append(context_parallel_place("dcp")))
        thread.start()
        thread.join()
        assert seen == [(1, 0)]
    assert context_parallel_place("dcp") == (1, 0)


@pytest.mark.usefixtures("no_groups")
def test_an_error_inside_the_block_takes_the_given_groups_away_too() -> None:
    with pytest.raises(ZeroDivisionError), use_context_parallel_groups(dcp=ContextParallelGroup()):
        raise ZeroDivisionError
    with pytest.raises(ContractError):
        get_dcp_group()


def test_collectives_of_one_rank_change_nothing() -> None:
    group, tensor = ContextParallelGroup(), torch.arange(6.0).view(2, 3)
    assert torch.equal(group.all_gather(tensor), tensor)
    assert torch.equal(group.reduce_scatter(tensor, dim=0), tensor)
    assert torch.equal(group.all_to_all(tensor), tensor.unsqueeze(0))


def test_collectives_of_a_group_that_only_states_its_size_are_refused() -> None:
    group, tensor = ContextParallelGroup(2, 1), torch.zeros(4, 4)
    for collective in (group.all_gather, group.reduce_scatter, group.all_to_all):
        with pytest.raises(ContractError, match="device_group: got None for a group of 2 ranks"):
            collective(tensor)


@pytest.mark.parametrize("scheme", ["all_gather_reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("base_on_e", [True, False])
def test_a_merge_across_one_rank_returns_what_came(scheme: str, base_on_e: bool) -> None:
    out, lse = random_state(17, torch.float32)
    got = merge_across_ranks(
        out,
        lse,
        ContextParallelGroup(),
        scheme=scheme,
        base_on_e=base_on_e,  # type: ignore[arg-type]
    )
    assert torch.equal(got[0], out)
    torch.testing.assert_close(got[1], lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "ring"}, "scheme: got 'ring'"),
        (
            {"out": torch.zeros(5, 3, 8), "lse": torch.zeros(5, 3)},
            r"out.shape\[1\]: got 3; allowed: a multiple of .* 2 ranks",
        ),
        ({"out": torch.zeros(5, 24)}, "out.shape"),
        ({"lse": torch.zeros(4, 5)}, "lse.shape"),
        ({"lse": torch.zeros(5, 4, dtype=torch.float64)}, "lse.dtype"),
        ({"lse": torch.zeros(5, 4, device="meta")}, "lse.device"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_what_cannot_be_merged_across_ranks_is_refused(
    change: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {
        "out": torch.zeros(5, 4, 8),
        "lse": torch.zeros(5, 4),
        "group": ContextParallelGroup(2, 0),
    } | change
    with pytest.raises(ValueError, match=message):
        merge_across_ranks(**arguments)  # type: ignore[arg-type]


# Worlds of several processes.


def run_world(world_size: int, last_argument: str) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(WORKER), str(rank), str(world_size), last_argument],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * world_size, "\n".join(errors)


Found = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[2, 4], ids="ranks={}".format)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank of a world found."""
    folder = tmp_path_factory.mktemp("world")
    run_world(request.param, str(folder))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(request.param)]


def test_each_rank_knows_its_place(world: list[Found]) -> None:
    for rank, found in enumerate(world):
        assert found["place"].tolist() == [rank, len(world)]


def test_collectives_honour_dimension_and_strides(world: list[Found]) -> None:
    bases = [torch.arange(24.0).view(4, 6).t() + 1000 * rank for rank in range(len(world))]
    parts = [base.chunk(len(world), dim=1) for base in bases]
    for rank, found in enumerate(world):
        assert torch.equal(found["all_gather_last"], torch.cat(bases, dim=1))
        assert torch.equal(found["all_gather_first"], torch.cat(bases, dim=0))
        assert torch.equal(found["reduce_scatter"], sum(bases).chunk(len(world), dim=1)[rank])
        assert torch.equal(found["all_to_all"], torch.stack([p[rank] for p in parts]))


@pytest.mark.parametrize("scheme", ["all_gather_reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("declared", ["", "mixed/"], ids=["natural", "bases differ by rank"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_across_ranks_equals_the_merge_in_one_process(
    world: list[Found], scheme: str, declared: str, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    expected = merge_states(
        [found[f"{name}/out"].float() for found in world],
        [found[f"{name}/lse"] for found in world],
    )
    assert torch.isneginf(expected[1][0]).all()
    outs = torch.cat([found[f"{scheme}/{name}/{declared}out"] for found in world], dim=1)
    lses = [found[f"{scheme}/{name}/{declared}lse"] for found in world]
    if declared:
        lses = [lse * (1 if rank % 2 == 0 else math.log(2)) for rank, lse in enumerate(lses)]
    assert outs.dtype == dtype
    assert torch.equal(outs[0], torch.zeros_like(outs[0]))
    # One rounding to the output's dtype; base 2 costs a few roundings of lse (up to 20 in size).
    tolerance = torch.finfo(dtype).eps + (2e-5 if declared else 1e-6)
    torch.testing.assert_close(outs.float(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat(lses, dim=1), expected[1], rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_world_of_four_is_cut_both_ways(world: list[Found]) -> None:
    assert [found["dcp"].tolist() for found in world] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found["pcp"].tolist() for found in world] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["places"].tolist() for found in world] == [[0, 0], [1, 0], [0, 1], [1, 1]]


def test_a_world_is_made_from_the_environment_and_destroyed_with_its_groups() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    run_world(2, str(port))
