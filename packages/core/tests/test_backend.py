"""What `AttentionBackend` answers by default, and how it words what it declines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionImplBase,
    AttentionMetadataBuilder,
    AttentionType,
    DeviceCapability,
    KVCacheLayout,
    MLAAttentionImpl,
    MultipleOf,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)
from attnmux.kv_cache import FullAttentionSpec


class PlainBuilder(AttentionMetadataBuilder[Any]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False):
        return None


class Plain(AttentionBackend):
    """Inherits every default."""

    @staticmethod
    def get_name() -> str:
        return "PLAIN"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        return AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return PlainBuilder


def variant(**overrides: Any) -> type[AttentionBackend]:
    """`Plain` with other answers; a plain value becomes a class method that returns it."""
    members = {
        name: value
        if isinstance(value, (classmethod, staticmethod, list))
        else classmethod(lambda cls, *args, _value=value: _value)
        for name, value in overrides.items()
    }
    return type("Variant", (Plain,), members)


def sizes(*values: int | MultipleOf) -> Any:
    return staticmethod(lambda: list(values))


REQUEST: dict[str, Any] = {
    "head_size": 64,
    "dtype": torch.float16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(8, 0),
    "attn_type": AttentionType.DECODER,
}


def test_a_plain_request_is_valid_by_default() -> None:
    assert Plain.validate_configuration(**REQUEST) == []


@pytest.mark.parametrize("missing", ["get_name", "get_impl_cls", "get_builder_cls"])
def test_a_backend_states_its_name_and_classes(missing: str) -> None:
    incomplete = type("Incomplete", (AttentionBackend,), {})
    with pytest.raises(NotImplementedError):
        getattr(incomplete, missing)()
    with pytest.raises(TypeError, match=missing):
        incomplete()


# What is asked, what the backend overrides to decline it, and the reason. In the order in which
# reasons are listed; a backend that supports the opposite kind declines the plain request.
REASONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"get_supported_head_sizes": [80, 96]}, "head_size not supported"),
    ({"dtype": torch.float32}, {}, "dtype not supported"),
    ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype not supported"),
    (
        {"block_size": 24},
        {"get_supported_kernel_block_sizes": sizes(16)},
        "block_size not supported",
    ),
    ({"use_mm_prefix": True}, {}, "partial multimodal token full attention not supported"),
    ({"use_mla": True}, {}, "MLA not supported"),
    ({}, {"is_mla": True}, "non-MLA not supported"),
    ({"has_sink": True}, {}, "attention sinks not supported"),
    ({"use_sparse": True}, {}, "sparse not supported"),
    ({}, {"is_sparse": True}, "non-sparse not supported"),
    ({"use_per_head_quant_scales": True}, {}, "per-head quant scales not supported"),
    ({}, {"supports_compute_capability": False}, "compute capability not supported"),
    ({"attn_type": "encoder"}, {}, "attention type encoder not supported"),
    ({"has_sliding_window": True}, {}, "sliding window not supported"),
    ({"use_non_causal": True}, {}, "non-causal attention not supported"),
    (
        {"use_mla": True, "use_non_causal": True, "use_dcp": True},
        {"is_mla": True, "supports_non_causal": True},
        "non-causal MLA attention with DCP not supported",
    ),
    ({"use_batch_invariant": True}, {}, "batch invariance not supported"),
    ({"use_kv_connector": True}, {"supports_kv_connector": False}, "KV connector not supported"),
    ({"use_pcp": True}, {}, "PCP not supported"),
    (
        {"use_adaptive_verification": True},
        {"is_ssm": True},
        "device-cpu query lens mismatch not supported, this is needed for adaptive verification",
    ),
    ({}, {"supports_combination": "these two do not go together"}, "these two do not go together"),
]


@pytest.mark.parametrize(("asked", "declined", "reason"), REASONS, ids=[r[2] for r in REASONS])
def test_each_thing_declined_has_its_reason(
    asked: dict[str, Any], declined: dict[str, Any], reason: str
) -> None:
    members = {
        name: value if not isinstance(value, list) else classmethod(lambda cls, _v=value: _v)
        for name, value in declined.items()
    }
    assert variant(**members).validate_configuration(**REQUEST | asked) == [reason]


EVERYTHING = {
    "head_size": 64,
    "dtype": torch.float32,
    "kv_cache_dtype": "fp8",
    "block_size": 24,
    "use_mla": True,
    "has_sink": True,
    "use_sparse": True,
    "use_mm_prefix": True,
    "use_per_head_quant_scales": True,
    "device_capability": DeviceCapability(8, 0),
    "attn_type": AttentionType.ENCODER_ONLY.value,
    "has_sliding_window": True,
    "use_non_causal": True,
    "use_batch_invariant": True,
    "use_kv_connector": True,
    "use_pcp": True,
    "use_adaptive_verification": True,
    "use_dcp": True,
}


def test_reasons_come_all_together_in_their_order() -> None:
    nothing = variant(
        get_supported_head_sizes=classmethod(lambda cls: [80]),
        get_supported_kernel_block_sizes=sizes(16),
        supports_compute_capability=False,
        supports_kv_connector=False,
        is_ssm=True,
        supports_combination="together",
    )
    expected = [reason for _, _, reason in REASONS]
    expected = [
        r for r in expected if r not in ("non-MLA not supported", "non-sparse not supported")
    ]
    expected[expected.index("attention type encoder not supported")] = (
        "attention type encoder_only not supported"
    )
    expected[-1] = "together"
    assert nothing.validate_configuration(**EVERYTHING) == expected


# Each flag of a request with the answer that serves it.
SERVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"head_size": 96}, {"get_supported_head_sizes": classmethod(lambda cls: [80, 96])}),
    ({"dtype": torch.float32}, {"supported_dtypes": [torch.float32]}),
    ({"kv_cache_dtype": "fp8"}, {"supported_kv_cache_dtypes": ["auto", "fp8"]}),
    ({"kv_cache_dtype": "anything"}, {"supported_kv_cache_dtypes": []}),
    ({"kv_cache_dtype": None}, {}),
    ({"block_size": None}, {"get_supported_kernel_block_sizes": sizes(64)}),
    ({"use_mm_prefix": True}, {"supports_mm_prefix": True}),
    ({"use_mla": True}, {"is_mla": True}),
    ({"has_sink": True}, {"supports_sink": True}),
    ({"use_sparse": True}, {"is_sparse": True}),
    ({"use_per_head_quant_scales": True}, {"supports_per_head_quant_scales": True}),
    ({"attn_type": "encoder"}, {"supports_attn_type": True}),
    ({"has_sliding_window": True}, {"supports_sliding_window": True}),
    ({"use_non_causal": True}, {"supports_non_causal": True}),
    ({"use_non_causal": True, "use_dcp": True}, {"supports_non_causal": True}),
    (
        {"use_mla": True, "use_non_causal": True, "use_dcp": True},
        {"is_mla": True, "supports_non_causal": True, "supports_non_causal_dcp": True},
    ),
    ({"use_batch_invariant": True}, {"supports_batch_invariance": True}),
    ({"use_kv_connector": True}, {}),
    ({"use_pcp": True}, {"supports_pcp": True}),
    ({"use_adaptive_verification": True}, {}),
    # What is not asked for may be declined.
    ({"use_kv_connector": False}, {"supports_kv_connector": False}),
    ({"use_adaptive_verification": False}, {"is_ssm": True}),
    ({"use_dcp": True}, {"supports_non_causal_dcp": False}),
]


@pytest.mark.parametrize(
    ("asked", "answers"),
    SERVED,
    ids=[",".join(f"{k}={v}" for k, v in s[0].items()) for s in SERVED],
)
def test_what_is_supported_has_no_reason_against_it(
    asked: dict[str, Any], answers: dict[str, Any]
) -> None:
    assert variant(**answers).validate_configuration(**REQUEST | asked) == []


def test_a_combination_is_asked_with_the_request() -> None:
    seen: list[tuple[Any, ...]] = []

    def combination(cls: type, *args: Any) -> None:
        seen.append(args)

    variant(supports_combination=classmethod(combination)).validate_configuration(**REQUEST)
    names = list(REQUEST)[:8]
    assert seen == [(*[REQUEST[name] for name in names], REQUEST["device_capability"])]


@pytest.mark.parametrize(
    ("supported", "block_size", "expected"),
    [
        ((MultipleOf(1),), 7, True),
        ((MultipleOf(16),), 48, True),
        ((MultipleOf(16),), 24, False),
        ((16, 32), 32, True),
        ((16,), 64, True),  # an engine's block may be cut into several of the kernel's
        ((64,), 16, False),
        ((48, MultipleOf(20)), 40, True),
        ((48, MultipleOf(20)), 50, False),
        ((), 13, True),
    ],
    ids=str,
)
def test_block_sizes_are_multiples_of_what_kernels_take(
    supported: tuple[int | MultipleOf, ...], block_size: int, expected: bool
) -> None:
    backend = variant(get_supported_kernel_block_sizes=sizes(*supported))
    assert backend.supports_block_size(block_size) is expected
    assert backend.supports_block_size(None) is True


@pytest.mark.parametrize(
    ("supported", "default", "expected"),
    [
        ((MultipleOf(1),), 16, 16),
        ((MultipleOf(16), 8), 24, 24),
        ((MultipleOf(64), 48), 16, 48),
        ((MultipleOf(64),), 16, 64),
        ((), 17, 17),
    ],
    ids=str,
)
def test_the_preferred_block_size_is_the_default_or_the_smallest(
    supported: tuple[int | MultipleOf, ...], default: int, expected: int
) -> None:
    backend = variant(get_supported_kernel_block_sizes=sizes(*supported))
    assert backend.get_preferred_block_size(default) == expected


def test_defaults_that_carry_no_flag() -> None:
    assert Plain.full_cls_name() == (__name__, "Plain")
    assert Plain.supported_kv_cache_layouts() is None
    assert Plain.forward_includes_kv_cache_update is True
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    assert Plain.customize_spec(spec) is spec
    assert [size.base for size in Plain.get_supported_kernel_block_sizes()] == [1]


@pytest.mark.parametrize(
    "flag",
    [
        "is_mla",
        "is_sparse",
        "is_ssm",
        "supports_alibi",
        "supports_alibi_sqrt",
        "supports_batch_invariance",
        "supports_kv_sharing",
        "supports_logits_soft_cap",
        "supports_lse",
        "supports_mm_prefix",
        "supports_non_causal",
        "supports_non_causal_dcp",
        "supports_pcp",
        "supports_per_head_quant_scales",
        "supports_per_request_causal",
        "supports_rswa",
        "supports_sink",
        "supports_sliding_window",
    ],
)
def test_nothing_is_claimed_by_default(flag: str) -> None:
    assert getattr(Plain, flag)() is False


@pytest.mark.parametrize(
    "flag", ["supports_kv_connector", "supports_device_cpu_query_lens_mismatch"]
)
def test_two_things_hold_unless_denied(flag: str) -> None:
    assert getattr(Plain, flag)() is True


@pytest.mark.parametrize("attn_type", list(AttentionType))
def test_only_decoders_by_default(attn_type: AttentionType) -> None:
    is_decoder = attn_type is AttentionType.DECODER
    assert Plain.supports_attn_type(attn_type) is is_decoder
    assert Plain.supports_attn_type(attn_type.value) is is_decoder


def raising_impl() -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("impl_cls", "expected"),
    [
        (staticmethod(lambda: AttentionImpl), False),
        (staticmethod(lambda: MLAAttentionImpl), True),
        (staticmethod(raising_impl), False),
    ],
    ids=["standard", "latent", "no impl class"],
)
def test_prefill_context_parallelism_is_the_impls_answer(impl_cls: Any, expected: bool) -> None:
    assert variant(get_impl_cls=impl_cls).supports_pcp() is expected


def test_non_causal_dcp_is_the_builders_answer() -> None:
    able = type("AbleBuilder", (PlainBuilder,), {"supports_non_causal_multi_token_dcp": True})
    assert variant(get_builder_cls=staticmethod(lambda: able)).supports_non_causal_dcp() is True


def test_subclass_with_another_builder() -> None:
    other = type("OtherBuilder", (PlainBuilder,), {})
    made = subclass_attention_backend("Fast", Plain, other)
    assert (made.__name__, made.__bases__) == ("FastPlain", (Plain,))
    assert made.get_builder_cls() is other
    assert made.get_impl_cls() is AttentionImpl
    assert Plain.get_builder_cls() is PlainBuilder


def test_subclass_with_overrides() -> None:
    layouts = (KVCacheLayout.LBHNC,)
    made = subclass_attention_backend_with_overrides(
        "My", Plain, {"supported_kv_cache_layouts": classmethod(lambda cls: layouts), "extra": 3}
    )
    assert (made.__name__, made.get_name()) == ("MyPlain", "PLAIN")
    assert made.supported_kv_cache_layouts() is layouts
    assert made.extra == 3


def test_an_attention_type_is_its_string() -> None:
    assert AttentionType.DECODER == "decoder"
    assert AttentionType("encoder_only") is AttentionType.ENCODER_ONLY
