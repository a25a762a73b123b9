"""Ask one backend class whether it can serve a request: the contract's reasons, then our own.

The contract's ``validate_configuration`` is asked first and its reasons stay word for word. What
the contract has no reason for (ALiBi, soft cap, the layout of a cache that exists already, ...) is
asked after it, by a list of small checks. Beside each reason stand what came and what is allowed.
"""

from __future__ import annotations

import inspect
import traceback as tb
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from attnmux.abc.attention_type import AttentionType
from attnmux.abc.backend import AttentionBackend, MultipleOf
from attnmux.platform import DeviceCapability
from attnmux.plugins.failures import error_text, safe_repr, traceback_text
from attnmux.report import ASK_WITH, Reason
from attnmux.request import AttentionRequest

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "head_size": (),
    "dtype": (),
    "kv_cache_dtype": (None, "auto"),
    "block_size": (None,),
    "attn_type": ("decoder",),
}
"""Values that ask nothing, where that is not False; a value outside cannot be left unsaid."""

CONTRACT_ARGUMENTS = tuple(
    name
    for name in inspect.signature(AttentionBackend.validate_configuration).parameters
    if name != "cls"
)
"""What the contract's ``validate_configuration`` takes, in its order."""

_KNOWN_CAPABILITIES = tuple(
    DeviceCapability(*pair)
    for pair in (
        (7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (9, 4), (9, 5),
        (10, 0), (10, 3), (11, 0), (11, 1), (12, 0), (12, 1),
    )
)  # fmt: skip
"""Capabilities that exist, asked one by one to state a backend's range exactly."""


def reasons_against(
    backend: type[AttentionBackend],
    request: AttentionRequest,
    capability: DeviceCapability | None = None,
) -> tuple[Reason, ...]:
    """Every reason why ``backend`` cannot serve ``request``; empty means it can.

    Args:
        backend: the class; whatever it raises becomes a reason (``Exception`` only).
        request: what is asked. Its device type is not looked at: that is the plugin's to say.
        capability: of the device, where the request does not name it.
    """
    if request.device_capability is not None:
        capability = request.device_capability
    if capability is None:
        capability = DeviceCapability(0, 0)
    reasons = _contract_reasons(backend, request, capability)
    for check in ADDITIONAL_CHECKS:
        try:
            reason = check(backend, request)
        except Exception as error:
            reason = raised(backend, error)
        if reason is not None:
            reasons.append(reason)
    return tuple(reasons)


# The contract's own question ---------------------------------------------------------------


def untaken_arguments(backend: type[AttentionBackend]) -> tuple[str, ...]:
    """Arguments of the contract that this class's ``validate_configuration`` does not take."""
    taken = _taken_by(_function_of(backend))
    return () if taken is None else tuple(a for a in CONTRACT_ARGUMENTS if a not in taken)


def _function_of(backend: type[AttentionBackend]) -> Callable[..., Any]:
    method = backend.validate_configuration
    return getattr(method, "__func__", method)


@lru_cache(maxsize=256)
def _taken_by(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the parameters, or None when it takes any keyword. Looked at once a function."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _contract_reasons(
    backend: type[AttentionBackend], request: AttentionRequest, capability: DeviceCapability
) -> list[Reason]:
    arguments = {name: getattr(request, name) for name in CONTRACT_ARGUMENTS}
    arguments["device_capability"] = capability
    unsaid: list[Reason] = []
    try:
        taken = _taken_by(_function_of(backend))
        if taken is not None:
            unsaid = _unsaid(backend, arguments, taken)
            # Later additions of ours are handed over too, where an override has the name.
            known = {**{name: getattr(request, name) for name in _LATER_FLAGS}, **arguments}
            arguments = {name: value for name, value in known.items() if name in taken}
        answer = backend.validate_configuration(**arguments)
    except Exception as error:
        return [*unsaid, raised(backend, error)]
    if not isinstance(answer, list | tuple) or not all(isinstance(a, str) for a in answer):
        text = f"validate_configuration answered {safe_repr(answer)}"
        return [*unsaid, Reason(text, allowed="a list of strings", remedy=TELL_AUTHORS)]
    return [_detailed(text, backend, request, capability) for text in answer] + unsaid


TELL_AUTHORS = "report it to the authors of the backend"
"""Remedy of an exception; who knows where the backend comes from puts a name in its place."""

_LATER_FLAGS = (
    "use_alibi",
    "use_alibi_sqrt",
    "has_logits_soft_cap",
    "use_rswa",
    "use_per_request_causal",
    "needs_lse",
    "use_kv_sharing",
)


def _unsaid(
    backend: type[AttentionBackend], arguments: Mapping[str, object], taken: frozenset[str]
) -> list[Reason]:
    """A reason for each wish that an older argument list has no word for."""
    return [
        Reason(
            f"validate_configuration of {backend.__name__} does not take {name}, so the backend "
            "cannot be asked (it was written for an older argument list)",
            got=f"{name}={value!r}",
            allowed="what it takes",
            remedy=f"upgrade the backend, or ask without {name}",
        )
        for name, value in arguments.items()
        if name not in taken
        and name != "device_capability"
        and value not in _NEUTRAL.get(name, (False,))
    ]


def raised(backend: type[AttentionBackend], error: BaseException) -> Reason:
    """The reason that an exception of the backend is, named after the question it was asked."""
    question = "validate_configuration"
    for frame in tb.extract_tb(error.__traceback__):
        if hasattr(AttentionBackend, frame.name) and not frame.name.startswith("_"):
            question = frame.name
    return Reason(
        f"{question} of {backend.__name__} raised {error_text(error)}",
        remedy=TELL_AUTHORS,
        traceback=traceback_text(error),
    )


# What came, and what is allowed --------------------------------------------------------------

Detail = tuple[str, str, str]
"""What came, what is allowed, what would help."""


def _detailed(
    text: str,
    backend: type[AttentionBackend],
    request: AttentionRequest,
    capability: DeviceCapability,
) -> Reason:
    try:
        detail = _detail(text, backend, request, capability)
    except Exception as error:
        # The reason stands without its details; why they are missing is said in their place.
        detail = ("", f"(not known: {error_text(error)})", "")
    return Reason(text, *detail)


def _detail(
    text: str,
    backend: type[AttentionBackend],
    request: AttentionRequest,
    capability: DeviceCapability,
) -> Detail:
    if text in _FLAG_REASONS:
        name = _FLAG_REASONS[text]
        value = getattr(request, name)
        return f"{name}={value}", f"{name}={not value}", f"{ASK_WITH}{name}={not value}"
    if text == "head_size not supported":
        return _choice("a head size", request.head_size, backend.get_supported_head_sizes())
    if text == "dtype not supported":
        dtypes = [_dtype_name(dtype) for dtype in backend.supported_dtypes]
        return _choice("a dtype", _dtype_name(request.dtype), dtypes)
    if text == "kv_cache_dtype not supported":
        return _choice(
            "a cache dtype", request.kv_cache_dtype, list(backend.supported_kv_cache_dtypes)
        )
    if text == "block_size not supported":
        sizes = [
            f"multiples of {size.base if isinstance(size, MultipleOf) else size}"
            for size in backend.get_supported_kernel_block_sizes()
        ]
        return _choice("a block size", request.block_size, sizes)
    if text == "compute capability not supported":
        able = [
            known.as_version_str()
            for known in _KNOWN_CAPABILITIES
            if backend.supports_compute_capability(known)
        ]
        return _choice("a device of capability", capability.as_version_str(), able)
    if text == f"attention type {request.attn_type} not supported":
        kinds = [str(k.value) for k in AttentionType if backend.supports_attn_type(k.value)]
        return _choice("an attention type", request.attn_type, kinds)
    return "", "", ""


def _choice(what: str, got: object, allowed: list[Any]) -> Detail:
    text = ", ".join(str(item) for item in allowed)
    if not text:
        return str(got), "", ""
    return str(got), text, f"use {what} it takes: {text}"


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


_FLAG_REASONS = {
    "partial multimodal token full attention not supported": "use_mm_prefix",
    "MLA not supported": "use_mla",
    "non-MLA not supported": "use_mla",
    "attention sinks not supported": "has_sink",
    "sparse not supported": "use_sparse",
    "non-sparse not supported": "use_sparse",
    "per-head quant scales not supported": "use_per_head_quant_scales",
    "sliding window not supported": "has_sliding_window",
    "non-causal attention not supported": "use_non_causal",
    "non-causal MLA attention with DCP not supported": "use_non_causal",
    "batch invariance not supported": "use_batch_invariant",
    "KV connector not supported": "use_kv_connector",
    "PCP not supported": "use_pcp",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": (
        "use_adaptive_verification"
    ),
}


# What the contract has no reason for -----------------------------------------------------------

Check = Callable[[type[AttentionBackend], AttentionRequest], Reason | None]


def _flag_check(flag: str, question: str, text: str) -> Check:
    """A check of one flag by one question of the backend."""

    def check(backend: type[AttentionBackend], request: AttentionRequest) -> Reason | None:
        if not getattr(request, flag) or getattr(backend, question)():
            return None
        return Reason(
            text, got=f"{flag}=True", allowed=f"{flag}=False", remedy=f"{ASK_WITH}{flag}=False"
        )

    return check


def _check_value_head_size(
    backend: type[AttentionBackend], request: AttentionRequest
) -> Reason | None:
    if request.use_mla or request.head_size_v in (None, request.head_size):
        return None
    taken = inspect.signature(backend.get_impl_cls().__init__).parameters
    if "head_size_v" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return None
    return Reason(
        "value heads of another size not supported",
        got=f"head_size_v={request.head_size_v}",
        allowed=f"head_size_v={request.head_size}",
        remedy=f"{ASK_WITH}head_size_v={request.head_size}",
    )


def _check_layout(backend: type[AttentionBackend], request: AttentionRequest) -> Reason | None:
    layouts = backend.supported_kv_cache_layouts()
    if request.kv_cache_layout is None or layouts is None or request.kv_cache_layout in layouts:
        return None
    allowed = ", ".join(layout.name for layout in layouts)
    return Reason(
        "kv_cache_layout not supported",
        got=request.kv_cache_layout.name,
        allowed=allowed,
        remedy=f"allocate the cache in a layout it reads: {allowed}",
    )


def _check_dcp(backend: type[AttentionBackend], request: AttentionRequest) -> Reason | None:
    if not request.use_dcp or backend.get_impl_cls().supports_dcp:
        return None
    return Reason(
        "DCP not supported",
        got="use_dcp=True",
        allowed="use_dcp=False",
        remedy=ASK_WITH + "use_dcp=False",
    )


ADDITIONAL_CHECKS: tuple[Check, ...] = (
    _flag_check("use_alibi", "supports_alibi", "ALiBi not supported"),
    _flag_check("use_alibi_sqrt", "supports_alibi_sqrt", "ALiBi (square root) not supported"),
    _flag_check("has_logits_soft_cap", "supports_logits_soft_cap", "logits soft cap not supported"),
    _flag_check("use_rswa", "supports_rswa", "reference sliding window not supported"),
    _flag_check(
        "use_per_request_causal", "supports_per_request_causal", "per-request causal not supported"
    ),
    _flag_check("needs_lse", "supports_lse", "log-sum-exp output not supported"),
    _flag_check("use_kv_sharing", "supports_kv_sharing", "KV sharing not supported"),
    _check_value_head_size,
    _check_layout,
    _check_dcp,
)
