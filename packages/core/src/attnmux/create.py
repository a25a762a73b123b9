"""Make a backend's impl and builder, handing over what their constructors take.

Constructors of the contract are fixed, yet features come that they do not know: sinks, options,
another size of value heads. What a constructor does not take and was not asked for is left out;
what was asked for is never dropped, it is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.abc.builder import AttentionMetadataBuilder
from attnmux.abc.impl import AttentionImplBase
from attnmux.checks import bad_argument
from attnmux.config import EngineConfigLike
from attnmux.kv_cache import KVCacheSpec

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


def create_impl(backend: type[AttentionBackend], **kwargs: Any) -> AttentionImplBase[Any]:
    """Make the impl of one layer.

    Args:
        backend: As `select_backend` returned it.
        **kwargs: Arguments of the impl's constructor, and of those that backends may add:
            ``sinks``, ``use_alibi_sqrt``, ``head_size_v``, ``options``.

    Raises:
        ValueError: Something is asked for that this impl's constructor does not take.
    """
    impl_cls = backend.get_impl_cls()
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

    Raises:
        ValueError: Options are given and the builder takes none though the impl does not either.
    """
    builder_cls = backend.get_builder_cls()
    kwargs: dict[str, Any] = {}
    # Options are the backend's: it may need them in the impl, in the builder or in both.
    if options is not None and _takes(builder_cls, "options"):
        kwargs["options"] = options
    elif options is not None and not _takes(backend.get_impl_cls(), "options"):
        raise bad_argument("options", options, f"None ({backend.get_name()} takes no options)")
    return builder_cls(kv_cache_spec, layer_names, config, torch.device(device), **kwargs)


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
            raise bad_argument(
                name,
                value if not isinstance(value, torch.Tensor) else f"a tensor {list(value.shape)}",
                f"nothing: {backend.get_name()} does not take it",
            )
    return taken


def _takes(cls: type[Any], name: str) -> bool:
    # The signature of __init__, not of the class: impls share a __new__ that takes anything.
    parameters = inspect.signature(cls.__init__).parameters
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
