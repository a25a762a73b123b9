"""What each layer of a model asks of attention, learned by watching one forward pass.

Configurations name the same thing in many ways, so the model itself is asked: it is called once
with a few tokens, and each layer's attention call is written down (head counts and sizes, scale,
soft cap, sinks, and the rule of its mask). What cannot be honoured is refused here, by name, before
anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from attnmux.backend import AttentionType
from attnmux.checks import bad_argument
from attnmux_transformers.attention import (
    AttentionCall,
    AttentionSwitch,
    UnsupportedModelError,
)
from attnmux_transformers.mask_rule import MaskRule, probing
from attnmux_transformers.model_call import call_model, keeps_logits

_PROBE_TOKENS = 3


@dataclass(frozen=True)
class LayerFeatures:
    """What one attention layer asks for.

    Attributes:
        name: Qualified name of its module.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_size: Elements of a query or key head.
        head_size_v: Elements of a value head.
        scale: Factor of the scores.
        dtype: Of query, key and value.
        attn_type: ``AttentionType.DECODER`` or ``AttentionType.ENCODER_ONLY``.
        sliding_window: Tokens seen, the token itself included; None for all.
        logits_soft_cap: Cap of the scores, or None.
        sinks: One logit a head, ``[num_heads]`` float32, or None. Not part of equality.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    dtype: torch.dtype
    attn_type: str
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False, repr=False)


class _Probe:
    """A step that writes down each attention call and answers it with zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        num_tokens, num_heads, _ = call.query.shape
        return call.value.new_zeros(num_tokens, num_heads, call.value.shape[-1])


def probe_model(
    model: PreTrainedModel, attn_type: str = AttentionType.DECODER
) -> list[LayerFeatures]:
    """Call `model` once with a few tokens and return what its layers ask for, in calling order.

    Args:
        model: In evaluation mode. Its attention implementation is left as it was.
        attn_type: ``DECODER`` for causal models, ``ENCODER_ONLY`` for encoders.

    Raises:
        UnsupportedModelError: With every reason, if a layer needs what the contract or this package
            cannot give (chunked or image-dependent masks, recurrent layers, attention outside
            transformers' interface, unknown keywords).
        ValueError: If the model is none of transformers, or is in training mode.
    """
    if not isinstance(model, PreTrainedModel):
        raise bad_argument(
            "model", repr(model)[:80], "a loaded model, as AutoModel.from_pretrained returns it"
        )
    if model.training:
        raise bad_argument("model.training", True, "False (call model.eval())")
    probe = _Probe()
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    wanted = positions[-1:] if keeps_logits(model) else None
    switch = AttentionSwitch(model)
    try:
        with switch.on(), probing():
            call_model(model, probe, torch.zeros_like(positions), positions, wanted)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be called with one row of tokens and their positions: "
            f"{type(error).__name__}: {error}"
        ) from error
    problems = _model_problems(model, probe.calls, attn_type)
    names = {module: name for name, module in model.named_modules()}
    for call in probe.calls:
        problems += [f"{names[call.module]}: {text}" for text in _call_problems(call, attn_type)]
    if problems:
        kind = AttentionType(attn_type).value
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run on attnmux as {kind}:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    return [_features(call, names[call.module], attn_type) for call in probe.calls]


def _model_problems(
    model: PreTrainedModel, calls: list[AttentionCall], attn_type: str
) -> list[str]:
    problems = []
    modules = [call.module for call in calls]
    expected = model.config.get_text_config().num_hidden_layers
    if not calls:
        problems.append("no layer asked transformers' attention interface")
    elif len(set(modules)) < expected and attn_type == AttentionType.DECODER:
        problems.append(
            f"{len(set(modules))} of {expected} layers asked transformers' attention interface; "
            "layers that keep another state (recurrent, linear attention) are not supported"
        )
    if attn_type == AttentionType.DECODER and len(set(modules)) < len(modules):
        problems.append("a layer is called twice in a pass, so its keys cannot be kept once")
    return problems


def _call_problems(call: AttentionCall, attn_type: str) -> list[str]:
    problems = [
        f"passes {name} to its attention, which is not known here" for name in sorted(call.unknown)
    ]
    problems += _mask_problems(call.mask_rule, attn_type)
    if call.is_causal is False and attn_type == AttentionType.DECODER:
        problems.append("its call says is_causal=False")
    if call.sinks is None and isinstance(getattr(call.module, "sinks", None), torch.Tensor):
        problems.append("has sinks, but does not pass them to its attention")
    lengths = {len(call.query), len(call.key), len(call.value)}
    if lengths != {_PROBE_TOKENS}:
        problems.append(f"attends with {sorted(lengths)} tokens of {_PROBE_TOKENS}")
    if call.query.shape[1] % call.key.shape[1]:
        problems.append(f"{call.query.shape[1]} heads do not divide among {call.key.shape[1]}")
    return problems


def _mask_problems(rule: MaskRule | None, attn_type: str) -> list[str]:
    if rule is None:
        return ["got no mask from transformers' mask interface, so its causality is unknown"]
    if rule.problem is not None:
        return [rule.problem]
    wanted = attn_type == AttentionType.DECODER
    if rule.causal != wanted:
        said, needed = ("causal", "both ways") if rule.causal else ("both ways", "causal")
        return [f"its mask is {said}, where {needed} is needed"]
    return []


def _features(call: AttentionCall, name: str, attn_type: str) -> LayerFeatures:
    rule = call.mask_rule or MaskRule()
    return LayerFeatures(
        name=name,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_size=call.query.shape[2],
        head_size_v=call.value.shape[2],
        scale=call.scale,
        dtype=call.query.dtype,
        attn_type=attn_type,
        sliding_window=rule.sliding_window,
        logits_soft_cap=call.logits_soft_cap,
        sinks=None if call.sinks is None else call.sinks.detach().to(torch.float32),
    )
