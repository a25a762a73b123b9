"""The two functions that transformers calls: one for attention, one for its mask.

A model whose attention implementation is ``attnmux`` hands every attention call to
`attention_forward`. What to do there is decided by a *step*: an object passed to the model's own
call as the keyword `STEP_KEYWORD`, which transformers forwards to the attention function untouched.
So one row of concatenated tokens can carry a ragged batch. The few models that do not pass keywords
on to their layers find the step in the context of the call (`step_in_reach`).

Causality lives in the step's metadata and not in a mask tensor, hence `attention_mask` builds none.
Both functions have to be registered together: with the first alone, a model would lose its mask and
nobody would say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnmux.checks import bad_argument
from attnmux_transformers.mask_rule import MaskRule, classify_mask, is_probing

ATTENTION_NAME = "attnmux"
"""Name of the attention implementation in transformers."""

STEP_KEYWORD = "attnmux_step"
"""Keyword of the model's call that carries the step."""

_step: ContextVar[AttentionStep | None] = ContextVar("attnmux_transformers_step", default=None)

_CARRIED_BY_THE_CALL = frozenset(
    # What transformers passes along to every layer and no attention function computes with.
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
)


class UnsupportedModelError(ValueError):
    """The model's attention cannot go through the contract; the text lists every reason."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention call, in the contract's shapes.

    Attributes:
        module: The attention module that calls.
        query: ``[num_tokens, num_heads, head_size]``, a view of the model's tensor.
        key: ``[num_tokens, num_kv_heads, head_size]``, likewise.
        value: ``[num_tokens, num_kv_heads, head_size_v]``, likewise.
        scale: Factor of the scores.
        mask_rule: What the model's mask says; only there while a model is probed.
        logits_soft_cap: Cap of the scores, or None.
        sinks: One logit for each head, ``[num_heads]``, or None.
        is_causal: What the call says about causality, None where it says nothing.
        unknown: Keywords with a value that this package does not know.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    mask_rule: MaskRule | None = None
    logits_soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    is_causal: bool | None = None
    unknown: Mapping[str, object] = field(default_factory=dict)


class AttentionStep(Protocol):
    """What a step has to offer: it answers the attention call of each layer."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the output of the call, ``[num_tokens, num_heads, head_size_v]``."""
        ...


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Answer a layer's attention call through the step that the model was called with.

    Args:
        module: The attention module.
        query: ``[1, num_heads, num_tokens, head_size]``.
        key: ``[1, num_kv_heads, num_tokens, head_size]``.
        value: ``[1, num_kv_heads, num_tokens, head_size_v]``.
        attention_mask: What `attention_mask` returned for this layer.
        scaling: Factor of the scores; ``head_size ** -0.5`` when None.
        dropout: Must be 0.
        **kwargs: Features of the layer and the keywords of the model's call, the step among them.

    Returns:
        The output ``[1, num_tokens, num_heads, head_size_v]``, and None for the weights.

    Raises:
        ValueError: Without a step, with a batch dimension other than 1, with dropout, or with a
            mask tensor.
    """
    step = kwargs.pop(STEP_KEYWORD, None) or _step.get()
    if step is None:
        raise bad_argument(
            STEP_KEYWORD,
            "no step in the model's call",
            "a call made by attnmux_transformers (Engine or Encoder); use another attention "
            "implementation to call the model yourself",
        )
    if query.shape[0] != 1:
        raise bad_argument(
            "query.shape[0]", query.shape[0], "1 (one row of concatenated requests, no padding)"
        )
    if dropout:
        raise bad_argument("dropout", dropout, "0 (call model.eval())")
    if isinstance(attention_mask, torch.Tensor):
        raise bad_argument(
            "attention_mask", f"a tensor of shape {list(attention_mask.shape)}", "None"
        )
    kwargs.pop("sliding_window", None)  # the mask rule is what eager attention obeys
    call = AttentionCall(
        module=module,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        mask_rule=attention_mask if isinstance(attention_mask, MaskRule) else None,
        logits_soft_cap=kwargs.pop("softcap", None),
        sinks=kwargs.pop("s_aux", None),
        is_causal=kwargs.pop("is_causal", None),
        unknown={
            name: value
            for name, value in kwargs.items()
            if value is not None and value is not False and name not in _CARRIED_BY_THE_CALL
        },
    )
    return step.attend(call).unsqueeze(0), None


def attention_mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> MaskRule | None:
    """Build no mask; while a model is probed, return in words what the mask would be.

    Raises:
        ValueError: If the model was called with a padding mask, which would be dropped.
    """
    if attention_mask is not None:
        raise bad_argument(
            "attention_mask",
            f"a tensor of shape {list(attention_mask.shape)}",
            "None (requests are concatenated, never padded)",
        )
    if not is_probing():
        return None
    return classify_mask(kwargs["mask_function"], kwargs.get("config"))


@contextmanager
def step_in_reach(step: AttentionStep) -> Iterator[None]:
    """Inside the block, layers of this thread that get no keyword are answered by `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def register() -> None:
    """Register both functions with transformers under `ATTENTION_NAME`; again is nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)


class AttentionSwitch:
    """Lets a model's attention be answered by attnmux for a while, and as before after it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find what to switch; the model is left as it was.

        Raises:
            UnsupportedModelError: If the model, or a model inside it, does not ask transformers'
                attention interface.
        """
        register()
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        # Each once: a model and the model inside it often share their configuration.
        self._configs = list({id(each.config): each.config for each in models}.values())
        before = [config._attn_implementation for config in self._configs]
        try:
            model.set_attn_implementation(ATTENTION_NAME)
            for each in models:
                if each.config._attn_implementation != ATTENTION_NAME:
                    raise UnsupportedModelError(
                        f"model: got {type(each).__name__}, whose attention is written into the "
                        "model; allowed: a model that asks transformers' AttentionInterface"
                    )
        finally:
            self._set(before)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside the block, the attention implementation is attnmux."""
        before = [config._attn_implementation for config in self._configs]
        self._set([ATTENTION_NAME] * len(before))
        try:
            yield
        finally:
            self._set(before)

    def _set(self, names: Sequence[str]) -> None:
        for config, name in zip(self._configs, names, strict=True):
            config._attn_implementation = name
