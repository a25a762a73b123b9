"""Online softmax states and their merge, where rows see nothing."""

from __future__ import annotations

import pytest
import torch

from attnmux_cpu.kernels.softmax import SoftmaxState, merge_states
from attnmux_cpu.kernels.workspace import Workspace

INF = float("inf")


def _attend(
    scores: torch.Tensor, value: torch.Tensor, widths: list[int]
) -> tuple[torch.Tensor, ...]:
    n, rows, _ = scores.shape
    state = SoftmaxState.empty(Workspace(), n, rows, value.shape[-1])
    for part, part_value in zip(scores.split(widths, -1), value.split(widths, 1), strict=True):
        state.step(part.clone(), part_value)
    return state.finish()


def _problem(hidden: float) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 8, 12, generator=random) * 20
    scores.masked_fill_(torch.rand(2, 8, 12, generator=random) < hidden, -INF)
    scores[0, 0] = -INF
    scores[1, 3, :6] = -INF
    scores[1, 4, 6:] = -INF
    return scores, torch.randn(2, 12, 3, generator=random)


@pytest.mark.parametrize("widths", [[12], [6, 6], [1, 10, 1], [1] * 12], ids=str)
@pytest.mark.parametrize("hidden", [0.0, 0.5])
def test_any_cut_into_tiles_gives_the_same(widths, hidden):
    scores, value = _problem(hidden)
    output, lse = _attend(scores, value, widths)
    want_lse = scores.double().logsumexp(-1)
    weights = scores.double().softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(output.double(), weights @ value.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)
    assert lse[0, 0] == -INF
    assert (output[0, 0] == 0).all()


@pytest.mark.parametrize("cut", [1, 6, 11])
def test_merging_two_halves_gives_the_whole(cut):
    scores, value = _problem(0.5)
    whole = _attend(scores, value, [12])
    halves = [
        _attend(scores[..., part], value[:, part], [scores[..., part].shape[-1]])
        for part in (slice(0, cut), slice(cut, 12))
    ]
    merged = merge_states(*halves[0], *halves[1])
    for got, want in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_empty_side_does_not_count_whatever_it_holds(dtype):
    full = torch.ones(3, 4, dtype=dtype)
    empty = torch.full((3, 4), float("nan"), dtype=dtype)
    lse = torch.tensor([0.5, -3.0, 700.0])
    nothing = torch.full((3,), -INF)
    for merged, merged_lse in (
        merge_states(full, lse, empty, nothing),
        merge_states(empty, nothing, full, lse),
    ):
        assert torch.equal(merged, torch.ones(3, 4))
        assert torch.equal(merged_lse, lse)
    merged, merged_lse = merge_states(empty, nothing, empty, nothing)
    assert torch.equal(merged, torch.zeros(3, 4))
    assert torch.equal(merged_lse, nothing)


def test_a_state_without_a_tile_is_empty():
    state = SoftmaxState.empty(Workspace(), 2, 3, 4)
    state.acc.fill_(float("nan"))
    output, lse = state.finish()
    assert torch.equal(output, torch.zeros(2, 3, 4))
    assert torch.equal(lse, torch.full((2, 3), -INF))


def test_a_first_tile_for_some_problems_leaves_the_others_empty():
    state = SoftmaxState.empty(Workspace(), 2, 1, 1)
    state.acc.fill_(float("nan"))
    state.first(1).step(torch.zeros(1, 1, 2), torch.ones(1, 2, 1))
    output, lse = state.finish()
    assert output.flatten().tolist() == [1.0, 0.0]
    assert lse[1, 0] == -INF


def test_a_sink_joins_the_denominator_once():
    scores, value = _problem(0.5)
    for widths in ([12], [4, 4, 4]):
        state = SoftmaxState.empty(Workspace(), 2, 8, 3)
        for part, rows in zip(scores.split(widths, -1), value.split(widths, 1), strict=True):
            state.step(part.clone(), rows)
        output, lse = state.finish(torch.full((2, 8, 1), 4.0))
        with_sink = torch.cat([scores, torch.full((2, 8, 1), 4.0)], dim=-1).double()
        weights = with_sink.softmax(-1)[..., :-1]
        torch.testing.assert_close(lse.double(), with_sink.logsumexp(-1), rtol=1e-6, atol=1e-5)
        want = weights @ value.double()
        torch.testing.assert_close(output.double(), want, rtol=1e-5, atol=1e-6)
