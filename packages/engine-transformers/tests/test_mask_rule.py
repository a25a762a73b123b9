"""Masks of transformers, read as rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

from attnmux_transformers.attention import attention_mask
from attnmux_transformers.mask_rule import MaskRule, classify_mask, probing

CONFIG = SimpleNamespace(sliding_window=6)


def image_mask(*index: torch.Tensor) -> torch.Tensor:
    """A mask as models with images make it: some tokens see each other both ways."""
    overlay = masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, -1]]))
    return masking_utils.or_masks(masking_utils.causal_mask_function, overlay)(*index)


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (masking_utils.causal_mask_function, MaskRule()),
        (masking_utils.sliding_window_causal_mask_function(6), MaskRule(sliding_window=6)),
        (masking_utils.bidirectional_mask_function, MaskRule(causal=False)),
        # Transformers counts the distance there, the contract counts tokens.
        (
            masking_utils.sliding_window_bidirectional_mask_function(6),
            MaskRule(causal=False, sliding_window=7),
        ),
    ],
)
def test_masks_are_read(mask: Any, rule: MaskRule) -> None:
    assert classify_mask(mask, CONFIG) == rule


@pytest.mark.parametrize(
    "mask",
    [
        masking_utils.sliding_window_causal_mask_function(5),  # not the window of the config
        masking_utils.sliding_window_causal_mask_function(100_000),
        masking_utils.chunked_causal_mask_function(6, torch.zeros(1, dtype=torch.int64)),
        masking_utils.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 3),
        image_mask,
    ],
)
def test_other_masks_are_a_problem_and_never_taken_for_a_rule(mask: Any) -> None:
    assert classify_mask(mask, CONFIG).problem is not None


def test_no_mask_is_built_outside_of_a_probe() -> None:
    keywords = {"mask_function": masking_utils.causal_mask_function, "config": CONFIG}
    assert attention_mask(**keywords) is None
    with probing():
        assert attention_mask(**keywords) == MaskRule()
    assert attention_mask(**keywords) is None


def test_a_padding_mask_is_refused_and_not_dropped() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: got a tensor of shape \[2, 5\]"):
        attention_mask(attention_mask=torch.ones(2, 5))
