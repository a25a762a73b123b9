"""The kit's latent scenarios can fail: each broken backend is caught by one made for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.testing.mla.refusals import mla_refusals, run_mla_refusal
from attnmux.testing.mla.run import run_mla_scenario
from attnmux.testing.mla.scenarios import MlaScenario, mla_scenarios
from attnmux.testing.outcome import NonConformanceError
from attnmux_cpu.mla_backend import CPUMLABackend, CPUMLASparseBackend
from attnmux_cpu.mla_builder import CPUMLABuilder
from attnmux_cpu.mla_impl import CPUMLAImpl, CPUMLASparseImpl
from attnmux_cpu.options import CPUMLAOptions


def broken_impl(impl: type[Any], **methods: Any) -> type[CPUMLABackend]:
    """A backend whose impl has other methods."""
    base = CPUMLASparseBackend if impl.is_sparse else CPUMLABackend
    changed = type(impl.__name__, (impl,), methods)
    return type(base.__name__, (base,), {"get_impl_cls": staticmethod(lambda: changed)})


def in_mqa(change: Callable[..., Any], impl: type[Any] = CPUMLAImpl) -> type[CPUMLABackend]:
    """A backend whose `forward_mqa` result is changed."""

    def forward_mqa(self: Any, *args: Any) -> Any:
        return change(*impl.forward_mqa(self, *args), *args)

    return broken_impl(impl, forward_mqa=forward_mqa)


def with_query(change: Callable[..., Any]) -> type[CPUMLABackend]:
    """A backend that changes the query of `forward_mqa` before it is used."""

    def forward_mqa(self: Any, q: Any, *args: Any) -> Any:
        return CPUMLAImpl.forward_mqa(self, change(q), *args)

    return broken_impl(CPUMLAImpl, forward_mqa=forward_mqa)


def with_scale(scale: Callable[[Any], float]) -> type[CPUMLABackend]:
    """A backend that assumes the factor of the scores."""

    def constructor(self: Any, **kwargs: Any) -> None:
        CPUMLAImpl.__init__(self, **kwargs)
        self.scale = scale(self)

    return broken_impl(CPUMLAImpl, __init__=constructor)


def in_build(change: Callable[..., Any]) -> type[CPUMLABackend]:
    """A backend whose metadata is changed; `change` may also spoil the batch it was built from."""

    def build(self: Any, common_prefix_len: int, batch: Any, fast_build: bool = False) -> Any:
        return change(CPUMLABuilder.build(self, common_prefix_len, batch), batch)

    changed = type("Builder", (CPUMLABuilder,), {"build": build})
    return type("Backend", (CPUMLABackend,), {"get_builder_cls": staticmethod(lambda: changed)})


def in_decode(change: Callable[..., dict[str, Any]]) -> type[CPUMLABackend]:
    """A backend whose schedule of decodes is changed."""
    return in_build(lambda m, _: replace(m, decode=replace(m.decode, **change(m.decode))))


def in_contexts(change: Callable[[Any], Any]) -> type[CPUMLABackend]:
    """A backend whose rounds of contexts are changed."""
    return in_build(
        lambda m, _: replace(
            m, prefill=replace(m.prefill, context_rounds=change(m.prefill.context_rounds))
        )
    )


def in_update(change: Callable[..., None]) -> type[CPUMLABackend]:
    """A backend with another cache write; `change` gets the right one and its arguments."""

    def do_kv_cache_update(self: Any, *args: Any) -> None:
        change(lambda *right: CPUMLAImpl.do_kv_cache_update(self, *right), *args)

    return broken_impl(CPUMLAImpl, do_kv_cache_update=do_kv_cache_update)


def in_mha(change: Callable[..., None]) -> type[CPUMLABackend]:
    """A backend with another `forward_mha`; `change` gets the right one and its arguments."""

    def forward_mha(self: Any, *args: Any, **kwargs: Any) -> None:
        change(lambda *a, **k: CPUMLAImpl.forward_mha(self, *a, **k), *args, **kwargs)

    return broken_impl(CPUMLAImpl, forward_mha=forward_mha)


def reads_the_tails(output: torch.Tensor, lse: torch.Tensor, q: Any, cache: torch.Tensor, *_: Any):
    return output + (0 * cache).sum(), lse


def clips_the_table(metadata: Any, batch: Any) -> Any:
    return replace(metadata, block_table=metadata.block_table.clamp(0, 1))


def changes_the_batch(metadata: Any, batch: Any) -> Any:
    batch.seq_lens.add_(1)
    return metadata


def wraps_slots(update: Any, kv_c: Any, k_pe: Any, cache: torch.Tensor, slots: Any, *rest: Any):
    update(kv_c, k_pe, cache, slots % (cache.shape[0] * cache.shape[2]), *rest)


def swaps_two_slots(update: Any, kv_c: Any, k_pe: Any, cache: Any, slots: Any, *rest: Any):
    update(kv_c, k_pe, cache, slots.flip(0), *rest)


def loses_the_rotary_part(update: Any, kv_c: Any, k_pe: Any, *rest: Any):
    update(kv_c, torch.zeros_like(k_pe), *rest)


def fills_the_output(mha: Any, *args: Any):
    args[6].zero_()
    mha(*args)


def forgets_the_output_scale(mha: Any, *args: Any):
    mha(*args[:7], None if args[7] is None else torch.ones(1))


def keeps_the_key_size(mha: Any, q: torch.Tensor, *args: Any):
    mha(q.flip(-1), *args)


def without_the_newest(impl: Any, metadata: Any) -> torch.Tensor:
    lists = CPUMLASparseImpl._read_indices(impl, metadata)
    return lists.masked_fill(lists == lists.amax(dim=-1, keepdim=True), -1)


BROKEN = {
    "lse to base 2": (
        in_mqa(lambda output, lse, *_: (output, lse / math.log(2))),
        "mla.decode.plain",
        "log-sum-exp is wrong",
    ),
    "lse of nothing is 0": (
        in_mqa(lambda output, lse, *_: (output, lse.masked_fill(lse.isneginf(), 0.0))),
        "mla.decode.dummy_rows",
        "log-sum-exp is wrong",
    ),
    "rows of nothing are NaN": (
        in_mqa(lambda out, lse, *_: (out.masked_fill(lse.isneginf()[..., None], math.nan), lse)),
        "mla.decode.dummy_rows",
        "forward_mqa: the result is wrong",
    ),
    "unwritten memory is multiplied": (
        in_mqa(reads_the_tails),
        "mla.decode.plain",
        "forward_mqa: the result is wrong",
    ),
    "lse in the model's dtype": (
        in_mqa(lambda output, lse, *_: (output, lse.bfloat16())),
        "mla.decode.plain",
        "log-sum-exp: got torch.bfloat16",
    ),
    "one head too few": (
        in_mqa(lambda output, lse, *_: (output[:, :4], lse[:, :4])),
        "mla.decode.padded_heads",
        "forward_mqa: got",
    ),
    "rotary part forgotten": (
        with_query(lambda q: (q[0], q[1] * 0)),
        "mla.decode.plain",
        "forward_mqa: the result is wrong",
    ),
    "scale of the absorbed head": (
        with_scale(lambda impl: impl.head_size**-0.5),
        "mla.decode.plain",
        "forward_mqa: the result is wrong",
    ),
    "scale of the head assumed": (
        with_scale(lambda impl: impl.qk_head_dim**-0.5),
        "mla.prefill.plain",
        "forward_mha: the result is wrong",
    ),
    "newest key of drafts hidden": (
        in_decode(lambda d: {"num_visible": (d.num_visible - 1).clamp_min(0)}),
        "mla.decode.drafts",
        "forward_mqa: the result is wrong",
    ),
    "drafts see what follows": (
        in_decode(lambda d: {"num_visible": d.num_keys[:, None].expand_as(d.num_visible)}),
        "mla.decode.drafts",
        "forward_mqa: the result is wrong",
    ),
    "requests mixed up": (
        in_decode(lambda d: {"token_rows": d.token_rows.roll(1, 0)}),
        "mla.decode.plain",
        "forward_mqa: the result is wrong",
    ),
    "table clipped into the cache": (
        in_build(clips_the_table),
        "mla.decode.plain",
        "forward_mqa: the result is wrong",
    ),
    "context dropped": (
        in_contexts(lambda rounds: []),
        "mla.extend.contexts",
        "forward_mha: the result is wrong",
    ),
    "last round of a context dropped": (
        in_contexts(lambda rounds: rounds[:-1]),
        "mla.extend.contexts",
        "forward_mha: the result is wrong",
    ),
    "a round counted twice": (
        in_contexts(lambda rounds: [*rounds, *rounds[-1:]]),
        "mla.extend.uneven_contexts",
        "forward_mha: the result is wrong",
    ),
    "batch changed": (
        in_build(changes_the_batch),
        "mla.mixed.plain",
        "build changed metadata.seq_lens",
    ),
    "tokens do not add up": (
        in_build(lambda m, _: replace(m, num_prefill_tokens=m.num_prefill_tokens - 1)),
        "mla.mixed.plain",
        "do not add up",
    ),
    "slot -1 wraps": (
        in_update(wraps_slots),
        "mla.decode.dummy_rows",
        "do_kv_cache_update wrote outside its slots",
    ),
    "slots swapped": (in_update(swaps_two_slots), "mla.decode.plain", "cache write: key of row 0"),
    "rotary part not written": (
        in_update(loses_the_rotary_part),
        "mla.mixed.plain",
        "cache write: value of row 0",
    ),
    "cache scale ignored": (
        broken_impl(CPUMLAImpl, _cache_scale=lambda self, k_scale: 1.0),
        "mla.mixed.cache_fp8_e4m3_bfloat16",
        "cache write",
    ),
    "rows behind the tokens written": (
        in_mha(fills_the_output),
        "mla.mixed.pad_tokens",
        "forward_mha wrote outside its output rows",
    ),
    "output scale ignored": (
        in_mha(forgets_the_output_scale),
        "mla.prefill.output_fp8",
        "forward_mha: the result is wrong",
    ),
    "rotary part taken first": (
        in_mha(keeps_the_key_size),
        "mla.mixed.wide_values",
        "forward_mha: the result is wrong",
    ),
    "newest listed position dropped": (
        broken_impl(CPUMLASparseImpl, _read_indices=without_the_newest),
        "mla.decode.plain",
        "forward_mqa: the result is wrong",
    ),
    "lists hide the first position": (
        broken_impl(
            CPUMLASparseImpl,
            _read_indices=lambda self, m: (
                lists := CPUMLASparseImpl._read_indices(self, m)
            ).masked_fill(lists == 0, -1),
        ),
        "mla.mixed.longer_than_context",
        "forward_mqa: the result is wrong",
    ),
    "padding of lists read as position 0": (
        broken_impl(
            CPUMLASparseImpl,
            _read_indices=lambda self, m: CPUMLASparseImpl._read_indices(self, m).clamp_min(0),
        ),
        "mla.mixed.longer_than_context",
        "forward_mqa: the result is wrong",
    ),
}
"""Label → (backend, scenario that is made for it, what is said)."""


def scenario_of(backend: type[CPUMLABackend], name: str) -> MlaScenario:
    (found,) = (scenario for scenario in mla_scenarios(backend) if scenario.name == name)
    return found


@pytest.mark.parametrize("label", BROKEN)
def test_a_broken_backend_is_caught(label: str) -> None:
    backend, name, said = BROKEN[label]
    options = CPUMLAOptions(context_tokens=512)
    with pytest.raises(NonConformanceError) as caught:
        run_mla_scenario(backend, scenario_of(backend, name), options=options)
    assert said in caught.value.what


@pytest.mark.parametrize("label", BROKEN)
def test_the_scenario_passes_on_the_backend_that_is_not_broken(label: str) -> None:
    backend, name, _ = BROKEN[label]
    right = CPUMLASparseBackend if backend.is_sparse() else CPUMLABackend
    options = CPUMLAOptions(context_tokens=512)
    assert run_mla_scenario(right, scenario_of(right, name), options=options) <= 1.0


def takes_anything(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return torch.zeros(1), None


def fails_late(mha: Any, **kwargs: Any) -> None:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def writes_first(mha: Any, **kwargs: Any) -> None:
    kwargs["output"].zero_()
    mha(**kwargs)


@pytest.mark.parametrize(
    ("backend", "refusal", "said"),
    [
        (broken_impl(CPUMLAImpl, forward_mqa=takes_anything), "mqa_latent", "without an error"),
        (broken_impl(CPUMLASparseImpl, forward_mqa=takes_anything), "listed_twice", "without an"),
        (in_mha(fails_late), "mha_query", "raises RuntimeError, not ValueError"),
        (in_mha(writes_first), "kv_b_proj", "refused only after it had written"),
    ],
)
def test_a_backend_that_takes_bad_input_is_caught(
    backend: type[CPUMLABackend], refusal: str, said: str
) -> None:
    (wanted,) = (r for r in mla_refusals(backend) if r.name == refusal)
    with pytest.raises(NonConformanceError, match=said):
        run_mla_refusal(backend, wanted)
