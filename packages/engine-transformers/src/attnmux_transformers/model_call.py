"""How a model is called: one row of tokens, their positions, and a step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from attnmux_transformers.attention import STEP_KEYWORD, AttentionStep, step_in_reach


def call_model(
    model: PreTrainedModel,
    step: AttentionStep,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    wanted: torch.Tensor | None = None,
) -> Any:
    """Call `model` without a cache of its own, so that `step` answers its attention.

    Args:
        model: Its attention implementation has to be attnmux.
        step: Reaches the attention function as a keyword, and through the context in models that
            do not pass keywords on.
        tokens: int64 ``[num_tokens]``: the concatenated requests.
        positions: int64 ``[num_tokens]``: of each token in its own request.
        wanted: int64 ``[n]``: rows whose logits are wanted, for a model that `keeps_logits`.

    Returns:
        The model's output, as if it were for a batch of one.
    """
    keywords: dict[str, Any] = {STEP_KEYWORD: step, "return_dict": True}
    if getattr(model.config, "use_cache", None) is not None:
        keywords["use_cache"] = False
    if wanted is not None:
        keywords["logits_to_keep"] = wanted
    with step_in_reach(step), torch.inference_mode():
        return model(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), **keywords)


def keeps_logits(model: PreTrainedModel) -> bool:
    """Whether the model computes logits only for the rows that are wanted."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
