"""From logits to tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux_transformers.sampling import Sampler, SamplingParams

LOGITS = torch.tensor([0.1, 2.0, 1.5, -1.0, 1.9])
DRAWS = 2000


def drawn(logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, **params}))
    return [sampler.choose(logits) for _ in range(DRAWS)]


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals() -> None:
    assert Sampler(SamplingParams()).choose(LOGITS) == 1
    assert Sampler(SamplingParams()).choose(torch.tensor([1.0, 3.0, 3.0])) == 1


def test_tokens_come_as_often_as_their_probability() -> None:
    tokens = torch.tensor(drawn(temperature=0.7))
    frequencies = torch.bincount(tokens, minlength=5) / DRAWS
    wanted = (LOGITS / 0.7).softmax(0)
    # Five standard deviations of a share of 2000 draws are at most 5 * 0.5 / sqrt(2000) = 0.056.
    assert float((frequencies - wanted).abs().max()) < 0.056


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-6}, {1}),  # the likeliest always stays
        ({"top_p": 0.5}, {1, 4}),  # probabilities 0.36, 0.33, 0.22, 0.05, 0.02
        ({"top_p": 0.75}, {1, 2, 4}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # 0.52 of the two that are left
    ],
)
def test_only_the_likeliest_are_drawn(params: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn(**params)) == kept


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    assert drawn(seed=3) == drawn(seed=3)
    assert drawn(seed=3) != drawn(seed=4)


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert set(drawn(LOGITS * 1e3, temperature=1e-6)) == {1}


def test_tokens_of_no_probability_are_never_drawn() -> None:
    assert set(drawn(torch.tensor([0.0, float("-inf"), 0.0]))) == {0, 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_refused(bad: float, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature))
    with pytest.raises(ValueError, match="logits: got a maximum of"):
        sampler.choose(torch.tensor([0.0, bad, 1.0]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0), ("max_new_tokens", 1.5), ("temperature", -0.1),
        ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_k", 0.5),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}: got {value}; allowed: "):
        SamplingParams(**{field: value})
