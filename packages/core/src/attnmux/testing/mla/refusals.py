"""Bad input that a latent backend must refuse with a `ValueError` before it writes anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.testing.mla.case import MlaCase, TopkIndexer, make_mla_case
from attnmux.testing.mla.run import in_order_for, make_mla_builder, make_mla_impl
from attnmux.testing.mla.scenarios import MlaScenario
from attnmux.testing.outcome import NonConformanceError
from attnmux.testing.poison import Watch
from attnmux.testing.scenario import Request

_CACHE_DTYPES = ("fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_ds_mla")
_REQUESTS = (Request(1, 9), Request(1, 17), Request(6, 20))


class Attempt:
    """A batch that is all right, for one call of it to be spoiled."""

    def __init__(
        self, backend: type[AttentionBackend], device: torch.device | str, options: object | None
    ) -> None:
        """Make the batch: two decodes and a prefill with a context."""
        topk = 4 if backend.is_sparse() else None
        scenario = MlaScenario("mla.refuse.batch", (), _REQUESTS, topk=topk)
        self.backend, self.options = backend, options
        self.builder = make_mla_builder(backend, scenario, device, options)
        scenario = in_order_for(scenario, self.builder.reorder_batch_threshold)
        self.case: MlaCase = make_mla_case(scenario, backend, device)
        self.metadata = self.builder.build(0, self.case.metadata)
        rows, width = self.case.q.shape[0], scenario.num_heads * scenario.v_head_dim
        self.output = torch.full((rows, width), torch.nan, dtype=self.case.dtype, device=device)

    @cached_property
    def impl(self) -> Any:
        """The impl, made as it should be."""
        return make_mla_impl(self.backend, self.case, self.options)

    def construct(self, **changes: Any) -> Any:
        """Make the impl with other arguments."""
        return make_mla_impl(self.backend, self.case, self.options, **changes)

    def update(self, **changes: torch.Tensor) -> None:
        """Write the new rows."""
        case = self.case
        arguments = {
            "kv_c_normed": case.kv_c,
            "k_pe": case.k_pe,
            "kv_cache": case.kv_cache,
            "slot_mapping": case.metadata.slot_mapping,
            "kv_cache_dtype": case.scenario.kv_cache_dtype,
            "k_scale": case.layer._k_scale,
        }
        self.impl.do_kv_cache_update(**{**arguments, **changes})

    def build(self, causal: bool | torch.Tensor) -> None:
        """Build for a batch that looks ahead."""
        self.builder.build(0, self.case.metadata.replace(causal=causal))

    def mqa(self, impl: Any = None, **changes: Any) -> None:
        """Run the decodes, or all tokens of a sparse impl."""
        self.update()
        tokens = self._num_mqa_tokens()
        query = torch.cat([self.case.q_latent[:tokens], self.case.q_pe[:tokens]], dim=-1)
        arguments = {"q": query, "kv_c_and_k_pe_cache": self.case.kv_cache}
        (impl or self.impl).forward_mqa(
            **{**arguments, **changes}, attn_metadata=self.metadata, layer=self.case.layer
        )

    def mha(self, impl: Any = None, **changes: Any) -> None:
        """Run the prefill."""
        self.update()
        first, case = self._num_mqa_tokens(), self.case
        arguments = {
            "q": case.q[first:],
            "kv_c_normed": case.kv_c[first:],
            "k_pe": case.k_pe[first:],
            "kv_c_and_k_pe_cache": case.kv_cache,
            "output": self.output[first:],
        }
        (impl or self.impl).forward_mha(
            **{**arguments, **changes}, attn_metadata=self.metadata, k_scale=case.layer._k_scale
        )

    def _num_mqa_tokens(self) -> int:
        if self.impl.is_sparse and not self.impl.supports_dense_mha_prefill:
            return self.case.metadata.num_actual_tokens
        return int(self.metadata.num_decode_tokens)

    def lists(self, *places: tuple[int, int, int]) -> Any:
        """Return a sparse impl whose lists hold other positions: (token, place, position)."""
        assert self.case.indexer is not None
        buffer = self.case.indexer.topk_indices_buffer.clone()
        for token, place, position in places:
            buffer[token, place] = position
        return self.construct(indexer=TopkIndexer(buffer))


@dataclass(frozen=True)
class Refusal:
    """One kind of bad input."""

    name: str
    spoil: Callable[[Attempt], object]


def mla_refusals(backend: type[AttentionBackend]) -> list[Refusal]:
    """Return what a backend must refuse: what nobody can run, and what it does not declare."""
    refusals = [*_CONSTRUCTOR, *_CACHE, *_QUERY]
    refusals += _LISTS if backend.is_sparse() else _PREFILL
    undeclared = {
        "sliding_window": (backend.supports_sliding_window(), 8),
        "alibi_slopes": (backend.supports_alibi(), [0.5] * 4),
        "logits_soft_cap": (backend.supports_logits_soft_cap(), 30.0),
        "kv_sharing_target_layer_name": (backend.supports_kv_sharing(), "layers.0"),
    }
    for name, (declared, value) in undeclared.items():
        if not declared:
            refusals.append(_constructed(name, **{name: value}))
    if not backend.supports_non_causal():
        refusals.append(Refusal("non_causal", lambda a: a.build(causal=False)))
    if not backend.supports_per_request_causal():
        flags = torch.tensor([True, False, True])
        refusals.append(Refusal("per_request_causal", lambda a: a.build(causal=flags)))
    for name in _CACHE_DTYPES:
        if not backend.supports_kv_cache_dtype(name):
            refusals.append(_constructed(f"cache_{name}", kv_cache_dtype=name))
    return refusals


def run_mla_refusal(
    backend: type[AttentionBackend],
    refusal: Refusal,
    *,
    device: torch.device | str = "cpu",
    options: object | None = None,
) -> str:
    """Try one kind of bad input, and return the text of the error.

    Raises:
        NonConformanceError: it ran, it raised something else, or it had written already.
    """
    attempt = Attempt(backend, device, options)
    writable = attempt.case.writable_rows() if refusal in (*_QUERY, *_LISTS, *_PREFILL) else None
    watches = [
        Watch.of("kv_cache", attempt.case.kv_cache, writable),
        Watch.of("output", attempt.output),
    ]
    try:
        refusal.spoil(attempt)
    except ValueError as error:
        for watch in watches:
            if found := watch.complaint():
                raise NonConformanceError(f"refused only after it had written: {found}") from error
        return str(error)
    except Exception as error:
        raise NonConformanceError(
            f"bad input raises {type(error).__name__}, not ValueError: {error}"
        ) from error
    raise NonConformanceError("bad input runs without an error")


def _constructed(label: str, **changes: Any) -> Refusal:
    return Refusal(label, lambda attempt: attempt.construct(**changes))


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[..., :1]], dim=-1)


_SIZES = replace(MlaScenario("", (), ()))
_CONSTRUCTOR = (
    _constructed(
        "no_rotary_part",
        qk_rope_head_dim=0,
        head_size=_SIZES.kv_lora_rank,
        qk_head_dim=_SIZES.qk_nope_head_dim,
    ),
    _constructed("head_size", head_size=_SIZES.head_size + 1),
    _constructed("qk_head_dim", qk_head_dim=_SIZES.qk_nope_head_dim),
    _constructed("no_heads", num_heads=0),
    _constructed("several_kv_heads", num_kv_heads=2),
    _constructed("encoder", attn_type="encoder"),
    _constructed("unknown_cache_dtype", kv_cache_dtype="bf61"),
)
_CACHE = (
    Refusal("narrow_cache", lambda a: a.update(kv_cache=a.case.kv_cache[..., :-1])),
    Refusal("wide_latent", lambda a: a.update(kv_c_normed=_wider(a.case.kv_c))),
    Refusal("rotary_dtype", lambda a: a.update(k_pe=a.case.k_pe.double())),
    Refusal(
        "too_many_slots",
        lambda a: a.update(slot_mapping=a.case.metadata.slot_mapping.repeat(2)),
    ),
    Refusal("float_slots", lambda a: a.update(slot_mapping=a.case.metadata.slot_mapping.float())),
)
_QUERY = (
    Refusal("mqa_narrow_cache", lambda a: a.mqa(kv_c_and_k_pe_cache=a.case.kv_cache[..., :-1])),
    Refusal("mqa_cache_dtype", lambda a: a.mqa(kv_c_and_k_pe_cache=a.case.kv_cache.half())),
    Refusal("mqa_heads", lambda a: a.mqa(q=(a.case.q_latent[:, :3], a.case.q_pe[:, :3]))),
    Refusal("mqa_latent", lambda a: a.mqa(q=(_wider(a.case.q_latent), a.case.q_pe))),
    Refusal("mqa_few_tokens", lambda a: a.mqa(q=(a.case.q_latent[:1], a.case.q_pe[:1]))),
)
_PREFILL = (
    Refusal("mha_narrow_cache", lambda a: a.mha(kv_c_and_k_pe_cache=a.case.kv_cache[..., :-1])),
    Refusal("mha_query", lambda a: a.mha(q=_wider(a.case.q[2:]))),
    Refusal("mha_output", lambda a: a.mha(output=a.output[2:, :-1])),
    Refusal("mha_scale_of_no_fp8", lambda a: a.mha(output_scale=torch.ones(1))),
    Refusal(
        "kv_b_proj",
        lambda a: a.mha(a.construct(kv_b_proj=lambda x: torch.cat([x, x], dim=-1))),
    ),
)
_LISTS = (
    Refusal("no_indexer", lambda a: a.construct(indexer=None)),
    Refusal("listed_twice", lambda a: a.mqa(a.lists((1, 0, 3), (1, 2, 3)))),
    Refusal("listed_outside", lambda a: a.mqa(a.lists((0, 1, 9)))),
    Refusal("listed_ahead", lambda a: a.mqa(a.lists((2, 1, 15)))),
    Refusal("listed_negative", lambda a: a.mqa(a.lists((0, 0, -2)))),
)
