"""Make a backend's impl and builder, handing over what their constructors take.

Constructors of the contract are fixed, yet features come that they do not know: sinks, options,
another size of value heads. What a constructor does not take and was not asked for is left out;
what was asked for is never dropped, it is refused. Options that the environment sets reach a
backend whether or not the engine thought of them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any, overload

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.abc.builder import AttentionMetadataBuilder
from attnmux.abc.impl import AttentionImpl, AttentionImplBase
from attnmux.abc.mla_impl import MLAAttentionImpl
from attnmux.checks import bad_argument
from attnmux.config import EngineConfigLike
from attnmux.kv_cache import KVCacheSpec
from attnmux.options import checked_options

_ABSENT: dict[str, Any] = {
    "sinks": None,
    "use_alibi_sqrt": False,
    "head_size_v": None,
    "options": None,
    "alibi_slopes": None,
    "sliding_window": None,
    "logits_soft_cap": None,
    "kv_sharing_target_layer_name": None,
    "indexer": None,
    "q_pad_num_heads": None,
}
"""The value of each keyword that asks for nothing."""


@overload
def create_impl(
    backend: type[AttentionBackend], *, kv_lora_rank: int, **kwargs: Any
) -> MLAAttentionImpl[Any]: ...


@overload
def create_impl(
    backend: type[AttentionBackend],
    *,
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int | None = None,
    alibi_slopes: Sequence[float] | None = None,
    sliding_window: int | None = None,
    kv_cache_dtype: str = "auto",
    logits_soft_cap: float | None = None,
    attn_type: str = "decoder",
    kv_sharing_target_layer_name: str | None = None,
    sinks: torch.Tensor | None = None,
    use_alibi_sqrt: bool = False,
    head_size_v: int | None = None,
    options: object | None = None,
    **kwargs: Any,
) -> AttentionImpl[Any]: ...


def create_impl(backend: type[AttentionBackend], **kwargs: Any) -> AttentionImplBase[Any]:
    """Make the impl of one layer.

    Args:
        backend: As `select_backend` returned it.
        **kwargs: Arguments of the impl's constructor: ``num_heads``, ``head_size``, ``scale``,
            ``num_kv_heads``, ``alibi_slopes``, ``sliding_window``, ``kv_cache_dtype``,
            ``logits_soft_cap``, ``attn_type``, ``kv_sharing_target_layer_name``, those of latent
            attention, and those that backends may add: ``sinks`` (float ``[num_heads]``),
            ``use_alibi_sqrt``, ``head_size_v``, ``options`` (as `attnmux.resolve_options` makes
            them; None: what the environment sets, or else the defaults).

    Raises:
        ValueError: Something is asked for that this impl's constructor does not take, or the
            options are not those of this backend.
    """
    _check_backend(backend)
    impl_cls = backend.get_impl_cls()
    options = checked_options(backend.get_name(), kwargs.get("options"))
    if options is not None:
        kwargs["options"] = options
    return impl_cls(**_taken_by(backend, impl_cls, kwargs))


def create_builder(
    backend: type[AttentionBackend],
    kv_cache_spec: KVCacheSpec,
    layer_names: list[str],
    config: EngineConfigLike,
    device: torch.device | str,
    options: object | None = None,
) -> AttentionMetadataBuilder[Any]:
    """Make the builder of a group of layers that share a cache spec.

    Args:
        backend: As `select_backend` returned it.
        kv_cache_spec: As the backend's ``customize_spec`` returned it.
        layer_names: The layers of the group.
        config: The engine's settings; a builder reads attributes, no particular class.
        device: Where the step's tensors are.
        options: As `attnmux.resolve_options` makes them; None: what the environment sets, or else
            the defaults.

    Raises:
        ValueError: The options are not those of this backend, or neither its builder nor its impl
            takes any.
    """
    _check_backend(backend)
    options = checked_options(backend.get_name(), options)
    builder_cls = backend.get_builder_cls()
    kwargs: dict[str, Any] = {}
    # Options are the backend's: it may need them in the impl, in the builder or in both.
    if options is not None and _takes(builder_cls, "options"):
        kwargs["options"] = options
    elif options is not None and not _takes(backend.get_impl_cls(), "options"):
        raise bad_argument("options", options, f"None ({backend.get_name()} takes no options)")
    return builder_cls(kv_cache_spec, layer_names, config, torch.device(device), **kwargs)


def _check_backend(backend: object) -> None:
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise bad_argument(
            "backend", repr(backend), "the class of a backend, as select_backend returns it"
        )


def _taken_by(
    backend: type[AttentionBackend], cls: type[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    taken = {}
    for name, value in kwargs.items():
        if _takes(cls, name):
            taken[name] = value
        elif name == "options" and _takes(backend.get_builder_cls(), name):
            continue
        elif name not in _ABSENT or not (value is None or value is _ABSENT[name]):
            close = difflib.get_close_matches(name, inspect.signature(cls.__init__).parameters, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise bad_argument(
                name,
                value if not isinstance(value, torch.Tensor) else f"a tensor {list(value.shape)}",
                f"nothing: {backend.get_name()} does not take it{hint}",
            )
    return taken


def _takes(cls: type[Any], name: str) -> bool:
    # The signature of __init__, not of the class: impls share a __new__ that takes anything.
    parameters = inspect.signature(cls.__init__).parameters
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
