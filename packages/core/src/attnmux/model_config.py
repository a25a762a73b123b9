"""From a model's ``config.json`` to the requests of its layers, one for each kind of layer.

Only the fields that attention depends on are read, and ``transformers`` is not imported. What the
contract has no word for (a learned bias by distance, say) is refused, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from attnmux.checks import bad_argument
from attnmux.request import AttentionRequest

ENCODERS = frozenset(
    {
        "albert", "bert", "camembert", "distilbert", "electra", "ernie", "modernbert",
        "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
    }
)  # fmt: skip
"""Model types whose layers see in both directions and keep no cache."""

BIASED = frozenset(
    {"deberta", "deberta-v2", "longt5", "mpnet", "mt5", "t5", "umt5", "switch_transformers"}
)
"""Model types that add a learned bias by distance to their scores."""

ALIBI = frozenset({"bloom", "mpt"})
SINKS = frozenset({"gpt_oss"})
BIDIRECTIONAL_IMAGES = frozenset({"gemma3", "paligemma", "gemma3n"})
"""Model types whose image tokens see each other in both directions."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that ask the same.

    Attributes:
        name: what they are, in words.
        layers: their indices, counted from 0.
        request: what they ask.
    """

    name: str
    layers: tuple[int, ...]
    request: AttentionRequest


@dataclass(frozen=True)
class ModelNeeds:
    """What a model asks of attention backends.

    Attributes:
        name: the architecture's name.
        model_type: as the configuration gives it.
        kinds: the kinds of its layers.
        notes: what was assumed or left out, and why.
    """

    name: str
    model_type: str
    kinds: tuple[LayerKind, ...]
    notes: tuple[str, ...] = ()


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Read a ``config.json``, or the one in a folder.

    Raises:
        ValueError: there is no such file, or it is no JSON object.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise bad_argument("config", str(path), f"a readable file ({error})") from error
    except ValueError as error:
        raise bad_argument("config", str(path), f"a JSON file ({error})") from error
    if not isinstance(data, dict):
        raise bad_argument("config", str(path), "a JSON object, as config.json of a model is")
    return data


def model_needs(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    kv_cache_dtype: str = "auto",
    block_size: int | None = 16,
    device: str = "cpu",
    device_capability: tuple[int, int] | None = None,
) -> ModelNeeds:
    """Derive the requests of a model's layers.

    Args:
        config: the parsed ``config.json`` of a model for ``transformers``.
        dtype: dtype of queries; None takes the configuration's.
        kv_cache_dtype: for the layers that have a cache.
        block_size: for the layers that have a cache.
        device: where the layers run.
        device_capability: of the device, when it is not this machine's.

    Raises:
        ValueError: a field is missing or contradicts another, or the model's attention is of a
            sort that the contract cannot express; the text names the field.
    """
    text = _text_part(config)
    model_type = str(config.get("model_type", text.get("model_type", "")))
    if model_type in BIASED:
        raise bad_argument(
            "model_type",
            repr(model_type),
            "a model whose scores have no learned bias by distance: it cannot be expressed",
        )
    notes: list[str] = []
    base = AttentionRequest(
        head_size=1,  # replaced below, once it is known what head sizes mean here
        dtype=dtype if dtype is not None else _dtype(config, text, model_type, notes),
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        device=device,
        device_capability=device_capability,  # type: ignore[arg-type]  # any pair is taken
    )
    if config.get("is_encoder_decoder"):
        kinds = _encoder_decoder(text, base)
    elif _is_encoder(text, model_type):
        kinds = _grouped(text, _encoder_layer(text, base), model_type, notes)
    elif text.get("kv_lora_rank"):
        kinds = _latent(text, base)
    else:
        kinds = _grouped(text, _decoder_layer(text, base, model_type), model_type, notes)
    kinds = [
        replace(kind, request=_with_model_features(kind.request, config, text, model_type))
        for kind in kinds
    ]
    kinds = _shared(text, kinds, notes)
    architectures = config.get("architectures") or [model_type or "model"]
    return ModelNeeds(str(architectures[0]), model_type, tuple(kinds), tuple(notes))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration, or all of it."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            part: Mapping[str, Any] = config[name]
            return part
    return config


def _dtype(
    config: Mapping[str, Any], text: Mapping[str, Any], model_type: str, notes: list[str]
) -> torch.dtype:
    for part in (config, text):
        name = part.get("dtype") or part.get("torch_dtype")
        if name:
            found = getattr(torch, str(name).removeprefix("torch."), None)
            if not isinstance(found, torch.dtype):
                raise bad_argument("torch_dtype", repr(name), "the name of a torch dtype")
            return found
    assumed = torch.float32 if model_type in ENCODERS else torch.bfloat16
    notes.append(f"the configuration names no dtype; {str(assumed)[6:]} is assumed (--dtype)")
    return assumed


# Numbers, under the names that configurations use ----------------------------------------------


def _integer(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise bad_argument(names[0], repr(config.get(names[0])), "an integer in the configuration")


def _layer_count(config: Mapping[str, Any]) -> int:
    return _integer(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    heads = _integer(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    head_size = config.get("head_dim")
    if head_size is None:
        hidden = _integer(config, "hidden_size", "n_embd", "d_model", "dim")
        if hidden % heads:
            raise bad_argument("hidden_size", hidden, f"a multiple of the {heads} heads")
        head_size = hidden // heads
    return heads, int(kv_heads), int(head_size)


def _with_heads(base: AttentionRequest, config: Mapping[str, Any]) -> AttentionRequest:
    heads, kv_heads, head_size = _heads(config)
    return replace(base, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size)


# Sorts of models ---------------------------------------------------------------------------------


def _is_encoder(text: Mapping[str, Any], model_type: str) -> bool:
    if text.get("is_decoder"):
        return False
    return model_type in ENCODERS or bool(text.get("use_bidirectional_attention") is True)


def _encoder_layer(text: Mapping[str, Any], base: AttentionRequest) -> AttentionRequest:
    plain = replace(base, attn_type="encoder_only", kv_cache_dtype=None, block_size=None)
    return _with_heads(plain, text)


def _decoder_layer(
    text: Mapping[str, Any], base: AttentionRequest, model_type: str
) -> AttentionRequest:
    alibi = model_type in ALIBI or bool(text.get("alibi"))
    options = text.get("attn_config")
    if isinstance(options, Mapping):
        alibi = bool(options.get("alibi", alibi))
    return replace(_with_heads(base, text), use_alibi=alibi)


def _latent(text: Mapping[str, Any], base: AttentionRequest) -> list[LayerKind]:
    """Latent attention: one KV head that holds the latent and the rope part."""
    latent = _integer(text, "kv_lora_rank")
    rope = _integer(text, "qk_rope_head_dim")
    request = replace(
        base,
        head_size=latent + rope,
        num_heads=_integer(text, "num_attention_heads"),
        num_kv_heads=1,
        use_mla=True,
        use_sparse=bool(text.get("index_topk")),
    )
    name = f"latent attention, {latent} latent + {rope} rope elements"
    if request.use_sparse:
        name += f", top {text['index_topk']} positions"
    return [LayerKind(name, tuple(range(_layer_count(text))), request)]


def _encoder_decoder(text: Mapping[str, Any], base: AttentionRequest) -> list[LayerKind]:
    layers = {
        side: tuple(range(_integer(text, f"{side}_layers", "num_hidden_layers", "num_layers")))
        for side in ("encoder", "decoder")
    }
    hidden = _integer(text, "d_model", "hidden_size")
    sizes = {}
    for side in ("encoder", "decoder"):
        heads = _integer(text, f"{side}_attention_heads", "num_attention_heads")
        sizes[side] = {"num_heads": heads, "num_kv_heads": heads, "head_size": hidden // heads}
    no_cache = {"kv_cache_dtype": None, "block_size": None}
    encoder: dict[str, Any] = {**sizes["encoder"], **no_cache, "attn_type": "encoder"}
    decoder: dict[str, Any] = sizes["decoder"]
    cross: dict[str, Any] = {**sizes["decoder"], "attn_type": "encoder_decoder"}
    return [
        LayerKind("encoder, sees both ways", layers["encoder"], replace(base, **encoder)),
        LayerKind("decoder, over its own tokens", layers["decoder"], replace(base, **decoder)),
        LayerKind("decoder, over the encoder's tokens", layers["decoder"], replace(base, **cross)),
    ]


# Kinds of layers of one model -----------------------------------------------------------------


def _grouped(
    text: Mapping[str, Any], request: AttentionRequest, model_type: str, notes: list[str]
) -> list[LayerKind]:
    """Group layers by whether they have a window."""
    names = _layer_types(text, model_type)
    window = text.get("sliding_window") or text.get("local_attention")
    encoder = request.attn_type == "encoder_only"
    kinds = []
    for sort in dict.fromkeys(names):
        layers = tuple(i for i, name in enumerate(names) if name == sort)
        if sort == "full_attention":
            name = "full attention, both ways" if encoder else "full attention"
            kinds.append(LayerKind(name, layers, request))
        elif sort == "sliding_attention":
            if not isinstance(window, int) or window < 1:
                raise bad_argument("sliding_window", repr(window), "an integer of at least 1")
            name = f"sliding window of {window} tokens"
            kinds.append(LayerKind(name, layers, replace(request, has_sliding_window=True)))
        elif sort == "chunked_attention":
            name = f"chunks of {text.get('attention_chunk_size')} tokens"
            kinds.append(LayerKind(name, layers, request))
            notes.append("chunks are made by the engine, which cuts requests at their borders")
        else:
            notes.append(f"{len(layers)} layers of type {sort} are no attention and ask nothing")
    return kinds


def _layer_types(text: Mapping[str, Any], model_type: str) -> Sequence[str]:
    """``full_attention``, ``sliding_attention`` or another word, for each layer."""
    count = _layer_count(text)
    given = text.get("layer_types")
    if isinstance(given, list):
        if len(given) != count:
            raise bad_argument("layer_types", f"{len(given)} entries", f"one for each of {count}")
        return [str(name) for name in given]
    full, sliding = "full_attention", "sliding_attention"
    if (every := text.get("global_attn_every_n_layers")) is not None:
        return [full if i % every == 0 else sliding for i in range(count)]
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return [full] * count
    if model_type == "gemma2":
        return [sliding if i % 2 == 0 else full for i in range(count)]
    if (pattern := text.get("sliding_window_pattern")) is not None:
        return [full if (i + 1) % pattern == 0 else sliding for i in range(count)]
    if text.get("use_sliding_window") is True:
        first = _integer(text, "max_window_layers")
        return [sliding if i >= first else full for i in range(count)]
    return [sliding] * count


def _with_model_features(
    request: AttentionRequest,
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    model_type: str,
) -> AttentionRequest:
    """Features that all layers of a model share."""
    cap = text.get("attn_logit_softcapping")
    return replace(
        request,
        has_logits_soft_cap=bool(cap),
        has_sink=model_type in SINKS,
        use_mm_prefix=model_type in BIDIRECTIONAL_IMAGES and "vision_config" in config,
    )


def _shared(text: Mapping[str, Any], kinds: list[LayerKind], notes: list[str]) -> list[LayerKind]:
    """Split off the last layers that read the cache of earlier ones."""
    shared = text.get("num_kv_shared_layers") or 0
    if not shared:
        return kinds
    first = _layer_count(text) - int(shared)
    parts = []
    for kind in kinds:
        own = tuple(i for i in kind.layers if i < first)
        later = tuple(i for i in kind.layers if i >= first)
        if own:
            parts.append(replace(kind, layers=own))
        if later:
            request = replace(kind.request, use_kv_sharing=True)
            parts.append(LayerKind(f"{kind.name}, on an earlier layer's cache", later, request))
    notes.append(f"the last {shared} layers read the cache of earlier layers")
    return parts


def layers_text(layers: Sequence[int]) -> str:
    """``0-31``, ``0, 2, 4, ... 40``, ``3``."""
    if not layers:
        return "none"
    if len(layers) == 1:
        return str(layers[0])
    step = layers[1] - layers[0]
    even = all(b - a == step for a, b in pairwise(layers))
    if even and step == 1:
        return f"{layers[0]}-{layers[-1]}"
    if even and len(layers) > 4:
        return f"{layers[0]}, {layers[1]}, {layers[2]}, ... {layers[-1]}"
    if len(layers) <= 8:
        return ", ".join(map(str, layers))
    return f"{len(layers)} of {layers[0]}-{layers[-1]}"
