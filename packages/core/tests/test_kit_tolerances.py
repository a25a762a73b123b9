"""Budgets: large enough for every honest arithmetic, too small for any mistake."""

from __future__ import annotations

import pytest
import torch

from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import solve
from attnmux.testing.tolerances import budget_for, judge, judge_lse, unit_roundoff


def _problem(dtype: torch.dtype, num_keys: int = 40, size: float = 1.5) -> AttentionProblem:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return AttentionProblem(
        (draw(num_keys, 4, 64) * size).to(dtype),
        draw(num_keys, 2, 64).to(dtype),
        draw(num_keys, 2, 64).to(dtype),
        query_start_loc=torch.tensor([0, num_keys]),
        seq_lens=torch.tensor([num_keys]),
    )


def _honest_answers(problem: AttentionProblem) -> dict[str, torch.Tensor]:
    """What stock attention calls give for the same problem."""
    query, key, value = (x.transpose(0, 1) for x in (problem.query, problem.key, problem.value))
    key, value = (x.repeat_interleave(2, dim=0) for x in (key, value))
    stock = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    scores = (query.float() @ key.float().mT) * problem.scale_factor
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    by_hand = (weights.to(problem.query.dtype) @ value).to(problem.query.dtype)
    return {"stock": stock.transpose(0, 1), "by hand": by_hand.transpose(0, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_keys", [1, 40, 300])
def test_honest_arithmetic_is_within_budget(dtype: torch.dtype, num_keys: int) -> None:
    problem = _problem(dtype, num_keys)
    exact = solve(problem)
    budget = budget_for(problem, exact)
    for name, answer in _honest_answers(problem).items():
        verdict = judge(answer, exact.output, budget.output)
        assert verdict.ratio <= 1.0, (name, verdict)


@pytest.mark.parametrize(
    ("dtype", "roundings"),
    # Outputs are of size 1. In float32 it is the sums of the scores that cost: their error goes
    # through the exponential, whatever the dtype of the weights.
    [(torch.bfloat16, 48), (torch.float16, 64), (torch.float32, 1000)],
)
def test_budget_is_a_few_roundings_of_the_values(dtype: torch.dtype, roundings: int) -> None:
    problem = _problem(dtype)
    budget = budget_for(problem, solve(problem))
    assert budget.output.max() < roundings * unit_roundoff(dtype)
    assert budget.output.min() > 0


def test_scores_rounded_to_bfloat16_are_over_budget() -> None:
    problem = _problem(torch.bfloat16, size=8.0)
    exact = solve(problem)
    query, key, value = (x.transpose(0, 1) for x in (problem.query, problem.key, problem.value))
    key, value = (x.repeat_interleave(2, dim=0) for x in (key, value))
    scores = (query @ key.mT) * problem.scale_factor  # bfloat16, as a careless kernel keeps them
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    answer = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ value
    verdict = judge(answer.transpose(0, 1), exact.output, budget_for(problem, exact).output)
    assert verdict.ratio > 1.0


def test_one_wrong_pair_among_many_is_found() -> None:
    problem = _problem(torch.bfloat16, 300)
    exact = solve(problem)
    budget = budget_for(problem, exact)
    got = exact.output.to(torch.bfloat16)
    got[211, 3, 17] += 0.25
    verdict = judge(got, exact.output, budget.output)
    assert (verdict.row, verdict.head) == (211, 3)
    assert verdict.ratio > 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_worse_than_anything(bad: float) -> None:
    problem = _problem(torch.float32)
    exact = solve(problem)
    budget = budget_for(problem, exact)
    got = exact.output.clone()
    got[5] += 100.0
    got[7, 1, 0] = bad
    assert judge(got, exact.output, budget.output)[:3] == (float("inf"), 7, 1)


def test_rows_that_see_nothing_have_no_budget() -> None:
    exact = torch.zeros(1, 1, 4, dtype=torch.float64)
    none = torch.zeros(1, 1, dtype=torch.float64)
    assert judge(torch.zeros(1, 1, 4), exact, none).ratio == 0.0
    assert judge(torch.full((1, 1, 4), 1e-30), exact, none).ratio == float("inf")


@pytest.mark.parametrize(
    ("got", "right", "is_right"),
    [
        (float("-inf"), float("-inf"), True),
        (0.0, float("-inf"), False),
        (float("-inf"), 0.0, False),
        (float("inf"), float("-inf"), False),
        (float("nan"), float("-inf"), False),
        (1.0001, 1.0, True),
    ],
)
def test_log_sum_exp_of_minus_infinity_must_be_exact(
    got: float, right: float, is_right: bool
) -> None:
    as_rows = [torch.tensor([[x]], dtype=torch.float64) for x in (got, right, 0.001)]
    assert (judge_lse(*as_rows).ratio <= 1.0) is is_right
