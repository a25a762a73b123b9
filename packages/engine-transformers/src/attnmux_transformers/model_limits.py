"""What a model allows: how many tokens, which ones, and which of them end a text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from attnmux.checks import bad_argument, check_positive

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def longest_request(model: PreTrainedModel, wanted: int | None) -> int:
    """Return the longest prompt and answer in tokens: `wanted`, or what the model allows.

    Raises:
        ValueError: `wanted` is out of range, is None where the model's configuration has no limit,
            or reaches to where positions would depend on the rest of the batch.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise bad_argument(
                "max_model_len", None, "a number of tokens, as the model's configuration has none"
            )
        wanted = int(limit)
    check_positive("max_model_len", wanted)
    if limit is not None and wanted > limit:
        raise bad_argument(
            "max_model_len", wanted, f"at most {limit}, as the model's configuration"
        )
    _check_rope(model, wanted)
    return wanted


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens with which the model ends a text; there may be none."""
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many tokens the model has an embedding for."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.num_embeddings)


def _check_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Refuse positions whose encoding would depend on what else is in the batch.

    Raises:
        ValueError: If the rotary frequencies change with the longest request (dynamic NTK,
            LongRoPE) and `max_model_len` reaches past the length at which they do.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    for each in kinds:
        if each.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = each.get("original_max_position_embeddings") or config.max_position_embeddings
            if max_model_len > limit:
                raise bad_argument(
                    "max_model_len",
                    max_model_len,
                    f"at most {limit} (beyond it, {each['rope_type']} rotary frequencies depend on "
                    "the longest request of a batch)",
                )
