"""What every attention implementation inherits."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from attnmux.backend import (
    AttentionImpl,
    AttentionImplBase,
    AttentionType,
    GroupShape,
    KVQuantMode,
    MLAAttentionImpl,
    QuantKey,
    ScaleDesc,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from attnmux.kv_cache import (
    CacheDTypeHandler,
    KVCacheLayout,
    MLAAttentionSpec,
    allocate,
    dtypes,
    register_cache_dtype,
)
from attnmux.parallel import (
    ContextParallelGroup,
    destroy_context_parallel,
    init_context_parallel,
    use_context_parallel_groups,
)


class Standard(AttentionImpl[Any]):
    """Never calls the base constructor, as ported implementations do."""

    def __init__(self, kv_cache_dtype: str = "auto") -> None:
        self.kv_cache_dtype = kv_cache_dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("not run here")


class WithLse(Standard):
    can_return_lse_for_decode = True


class Latent(MLAAttentionImpl[Any]):
    def __init__(self) -> None:
        self.scale = 1.0

    def forward_mqa(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        raise AssertionError("not run here")


def place(impl: AttentionImplBase[Any]) -> tuple[int, ...]:
    return (
        impl.dcp_world_size,
        impl.dcp_rank,
        impl.pcp_world_size,
        impl.pcp_rank,
        impl.total_cp_world_size,
        impl.total_cp_rank,
    )


@pytest.mark.parametrize("impl_cls", [Standard, Latent])
def test_without_groups_an_impl_is_alone(impl_cls: type[AttentionImplBase[Any]]) -> None:
    assert place(impl_cls()) == (1, 0, 1, 0, 1, 0)


@pytest.mark.parametrize("impl_cls", [Standard, Latent])
def test_an_impl_reads_its_place_when_it_is_made(impl_cls: type[AttentionImplBase[Any]]) -> None:
    dcp, pcp = ContextParallelGroup(4, 3), ContextParallelGroup(2, 1)
    with use_context_parallel_groups(dcp=dcp, pcp=pcp):
        impl = impl_cls()
    assert place(impl) == (4, 3, 2, 1, 4, 3)


def test_one_group_without_the_other() -> None:
    with use_context_parallel_groups(pcp=ContextParallelGroup(8, 5)):
        assert place(Standard()) == (1, 0, 8, 5, 1, 0)
    with use_context_parallel_groups(dcp=ContextParallelGroup(8, 5)):
        assert place(Standard()) == (8, 5, 1, 0, 8, 5)


def test_groups_that_were_initialised_are_read() -> None:
    init_context_parallel(1)
    try:
        assert place(Standard()) == (1, 0, 1, 0, 1, 0)
    finally:
        destroy_context_parallel()


@pytest.mark.parametrize(
    ("impl_cls", "dcp_size", "expected"),
    [(Standard, 1, False), (Standard, 2, False), (WithLse, 1, False), (WithLse, 2, True)],
)
def test_decodes_return_their_lse_where_ranks_need_it(
    impl_cls: type[AttentionImplBase[Any]], dcp_size: int, expected: bool
) -> None:
    with use_context_parallel_groups(dcp=ContextParallelGroup(dcp_size, 0)):
        assert impl_cls().need_to_return_lse_for_decode is expected
    assert impl_cls.need_to_return_lse_for_decode is False


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("auto", KVQuantMode.NONE),
        ("bfloat16", KVQuantMode.NONE),
        ("fp8", KVQuantMode.FP8_PER_TENSOR),
        ("fp8_e5m2", KVQuantMode.FP8_PER_TENSOR),
        ("int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD),
        ("fp8_per_token_head", KVQuantMode.FP8_PER_TOKEN_HEAD),
        ("int4_per_token_head", KVQuantMode.INT4_PER_TOKEN_HEAD),
        ("nvfp4", KVQuantMode.NVFP4),
    ],
)
def test_the_quant_mode_is_that_of_the_cache_dtype(name: str, mode: KVQuantMode) -> None:
    assert Standard(name).kv_quant_mode is mode


def test_a_registered_cache_dtype_has_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_handlers", dict(dtypes._handlers))
    handler = CacheDTypeHandler(
        "test_impl_dtype", torch.int8, quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD
    )
    register_cache_dtype(handler)
    assert Standard("test_impl_dtype").kv_quant_mode is KVQuantMode.INT8_PER_TOKEN_HEAD


@pytest.mark.parametrize(
    ("base", "missing"),
    [
        (AttentionImpl, "__init__"),
        (AttentionImpl, "forward"),
        (MLAAttentionImpl, "__init__"),
        (MLAAttentionImpl, "forward_mqa"),
    ],
)
def test_abstract_methods_are_the_impls_own(base: type[Any], missing: str) -> None:
    members = dict.fromkeys(base.__abstractmethods__, lambda self, *args: None)
    assert missing in members
    complete = type("Complete", (base,), members)
    assert isinstance(complete(), base)
    del members[missing]
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (base,), members)()


def call(impl: AttentionImplBase[Any], method: str) -> Any:
    bound = getattr(impl, method)
    required = [p for p in inspect.signature(bound).parameters.values() if p.default is p.empty]
    return bound(*[None] * len(required))


@pytest.mark.parametrize(
    ("impl_cls", "method"),
    [
        (Standard, "do_qk_norm_rope_kvcache_update"),
        (Standard, "do_rope_and_kv_cache_update"),
        (Standard, "do_kv_cache_update"),
        (Standard, "forward_with_lse"),
        (Latent, "forward_mha"),
    ],
)
def test_what_an_impl_does_not_offer_is_not_pretended(
    impl_cls: type[AttentionImplBase[Any]], method: str
) -> None:
    with pytest.raises(NotImplementedError):
        call(impl_cls(), method)


@pytest.mark.parametrize(
    "question", ["fused_qk_norm_rope_kvcache_supported", "fused_rope_kvcache_supported"]
)
def test_fusions_are_not_claimed_by_default(question: str) -> None:
    assert getattr(Standard(), question)() is False


NAMED_KEYS = [kFp8StaticTensorSym, kFp8Dynamic128Sym, kFp8Dynamic64Sym, kNvfp4Dynamic]


@pytest.mark.parametrize("key", NAMED_KEYS)
def test_latent_attention_quantises_its_output_all_four_ways(key: QuantKey) -> None:
    assert Latent().fused_output_quant_supported(key) is True
    assert Standard().fused_output_quant_supported(key) is False


def test_latent_attention_declines_other_quantisations() -> None:
    other = QuantKey(torch.int8, ScaleDesc(torch.float32, False, GroupShape.PER_TOKEN))
    assert Latent().fused_output_quant_supported(other) is False


def test_class_defaults_of_the_two_families() -> None:
    assert (Standard.supports_pcp, Standard.supports_dcp) == (False, True)
    assert (Latent.supports_pcp, Latent.supports_dcp) == (True, True)
    assert Standard.lse_base_on_e is True
    assert Standard.is_sparse is False
    assert Latent.supports_dense_mha_prefill is True
    assert Standard().process_weights_after_loading(torch.float16) is None


def test_the_decoder_is_the_default_type() -> None:
    parameters = inspect.signature(AttentionImpl.__init__).parameters
    assert parameters["attn_type"].default == AttentionType.DECODER == "decoder"


# The write of a latent cache, which MLA implementations inherit.

RANK, ROPE, BLOCK_SIZE = 8, 4, 4


def latent_cache(dtype: torch.dtype, kv_cache_dtype: str, layout: KVCacheLayout) -> torch.Tensor:
    spec = MLAAttentionSpec.for_layer(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=RANK + ROPE,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    cache = allocate({"a": spec, "b": spec}, 3, layout).views["b"]
    assert cache.shape == (3, 1, BLOCK_SIZE, RANK + ROPE)
    return cache


def latent_rows(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    latent = torch.randn(num_tokens, RANK, generator=generator).to(dtype)
    return latent, torch.randn(num_tokens, 1, ROPE, generator=generator).to(dtype)


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_a_latent_row_lands_in_its_slot(layout: KVCacheLayout, index_dtype: torch.dtype) -> None:
    cache = latent_cache(torch.bfloat16, "auto", layout)
    cache.fill_(9.0)
    latent, rope = latent_rows(4, torch.bfloat16)
    slots = torch.tensor([9, -1, 2], dtype=index_dtype)  # shorter than the tokens: rest ignored
    Latent().do_kv_cache_update(latent, rope, cache, slots, "auto", torch.tensor(1.0))
    expected = torch.full((3, 1, BLOCK_SIZE, RANK + ROPE), 9.0, dtype=torch.bfloat16)
    expected[9 // 4, 0, 9 % 4] = torch.cat([latent[0], rope[0, 0]])
    expected[2 // 4, 0, 2 % 4] = torch.cat([latent[2], rope[2, 0]])
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_quantised_latent_row_is_divided_by_its_scale_and_saturates(name: str) -> None:
    cache = latent_cache(torch.bfloat16, name, KVCacheLayout.LBNHC)
    latent, rope = latent_rows(1, torch.bfloat16)
    latent[0, 0] = 3e38
    scale = torch.tensor(0.5)
    Latent().do_kv_cache_update(latent, rope, cache, torch.tensor([5]), name, scale)
    stored = cache.to(torch.float32)[1, 0, 1]
    wanted = torch.cat([latent[0], rope[0, 0]]).float() / scale
    wanted = wanted.clamp(-torch.finfo(cache.dtype).max, torch.finfo(cache.dtype).max)
    assert torch.equal(stored, wanted.to(cache.dtype).float())
    assert torch.isfinite(stored).all()
    assert cache.view(torch.uint8).count_nonzero() <= RANK + ROPE


def test_an_empty_latent_cache_takes_nothing() -> None:
    latent, rope = latent_rows(2, torch.bfloat16)
    empty = torch.empty(0, dtype=torch.bfloat16)
    Latent().do_kv_cache_update(latent, rope, empty, torch.tensor([0, 1]), "auto", torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": torch.tensor([0.0])}, "slot_mapping.dtype"),
        ({"slot_mapping": torch.arange(5)}, "slot_mapping.shape"),
        ({"kv_cache_dtype": "nope"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache.dtype"),
        ({"kv_cache": torch.zeros(3, 1, 4, 13, dtype=torch.bfloat16)}, "kv_cache.shape"),
        ({"kv_cache": torch.zeros(3, 1, 4, 12)}, "kv_cache.dtype"),
        ({"k_pe": torch.zeros(3, 1, ROPE, dtype=torch.bfloat16)}, "k_pe.shape"),
        ({"k_pe": torch.zeros(2, 1, ROPE)}, "k_pe.dtype"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_a_latent_write_that_does_not_fit_is_refused_before_it_writes(
    change: dict[str, Any], message: str
) -> None:
    latent, rope = latent_rows(2, torch.bfloat16)
    cache = latent_cache(torch.bfloat16, "auto", KVCacheLayout.LBNHC)
    arguments = {
        "kv_c_normed": latent,
        "k_pe": rope,
        "kv_cache": cache,
        "slot_mapping": torch.tensor([0, 1]),
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones(1),
    } | change
    with pytest.raises(ValueError, match=message):
        Latent().do_kv_cache_update(**arguments)
    assert not cache.any()
