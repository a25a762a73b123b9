"""Every flag of a request against a backend that lacks it, and old or odd backends."""

from __future__ import annotations

import sys

import pytest
import torch

from attnmux.capability import CONTRACT_ARGUMENTS, reasons_against
from attnmux.request import AttentionRequest
from attnmux.selection import explain, select_backend


def request(**changes: object) -> AttentionRequest:
    return AttentionRequest(**{"head_size": 64, "dtype": torch.bfloat16, **changes})


def made(workshop, body: str = ""):
    """A backend class with this body."""
    return workshop.registry(workshop.plugin("one", {"A": body})).load("A").cls


# wish -> reason, what came, what is allowed; the backend under test has nothing but float dtypes
REFUSALS = {
    "mm prefix": (
        {"use_mm_prefix": True},
        "partial multimodal token full attention not supported",
        "use_mm_prefix=True",
        "use_mm_prefix=False",
    ),
    "mla": ({"use_mla": True}, "MLA not supported", "use_mla=True", "use_mla=False"),
    "sink": (
        {"has_sink": True},
        "attention sinks not supported",
        "has_sink=True",
        "has_sink=False",
    ),
    "sparse": ({"use_sparse": True}, "sparse not supported", "use_sparse=True", "use_sparse=False"),
    "per-head scales": (
        {"use_per_head_quant_scales": True},
        "per-head quant scales not supported",
        "use_per_head_quant_scales=True",
        "use_per_head_quant_scales=False",
    ),
    "dtype": (
        {"dtype": torch.float64},
        "dtype not supported",
        "float64",
        "float16, bfloat16, float32",
    ),
    "cache dtype": (
        {"kv_cache_dtype": "fp8"},
        "kv_cache_dtype not supported",
        "fp8",
        "auto, float16, bfloat16",
    ),
    "attention type": (
        {"attn_type": "encoder_only"},
        "attention type encoder_only not supported",
        "encoder_only",
        "decoder",
    ),
    "window": (
        {"has_sliding_window": True},
        "sliding window not supported",
        "has_sliding_window=True",
        "has_sliding_window=False",
    ),
    "non-causal": (
        {"use_non_causal": True},
        "non-causal attention not supported",
        "use_non_causal=True",
        "use_non_causal=False",
    ),
    "batch invariance": (
        {"use_batch_invariant": True},
        "batch invariance not supported",
        "use_batch_invariant=True",
        "use_batch_invariant=False",
    ),
    "pcp": ({"use_pcp": True}, "PCP not supported", "use_pcp=True", "use_pcp=False"),
    "alibi": ({"use_alibi": True}, "ALiBi not supported", "use_alibi=True", "use_alibi=False"),
    "soft cap": (
        {"has_logits_soft_cap": True},
        "logits soft cap not supported",
        "has_logits_soft_cap=True",
        "has_logits_soft_cap=False",
    ),
    "rswa": (
        {"use_rswa": True},
        "reference sliding window not supported",
        "use_rswa=True",
        "use_rswa=False",
    ),
    "per-request causal": (
        {"use_per_request_causal": True},
        "per-request causal not supported",
        "use_per_request_causal=True",
        "use_per_request_causal=False",
    ),
    "lse": (
        {"needs_lse": True},
        "log-sum-exp output not supported",
        "needs_lse=True",
        "needs_lse=False",
    ),
    "kv sharing": (
        {"use_kv_sharing": True},
        "KV sharing not supported",
        "use_kv_sharing=True",
        "use_kv_sharing=False",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_feature_that_is_lacking_is_a_reason_with_got_allowed_and_remedy(workshop, case) -> None:
    wish, text, got, allowed = REFUSALS[case]
    cls = made(workshop)
    assert reasons_against(cls, request()) == ()
    (reason,) = reasons_against(cls, request(**wish))
    assert (reason, reason.got, reason.allowed) == (text, got, allowed)
    assert reason.remedy


# wish -> body of a backend that refuses it by other means than a flag, reason, got, allowed
LIMITS = {
    "head size": (
        {"head_size": 80},
        "get_supported_head_sizes = classmethod(lambda cls: [64, 128])",
        ("head_size not supported", "80", "64, 128"),
    ),
    "block size": (
        {"block_size": 24},
        "get_supported_kernel_block_sizes = staticmethod(lambda: [16, MultipleOf(32)])",
        ("block_size not supported", "24", "multiples of 16, multiples of 32"),
    ),
    "capability": (
        {"device_capability": (8, 6)},
        "supports_compute_capability = classmethod(lambda cls, c: c == (10, 0))",
        ("compute capability not supported", "8.6", "10.0"),
    ),
    "capability of a sibling chip": (
        {"device_capability": (10, 3)},
        "supports_compute_capability = classmethod(lambda cls, c: c == (10, 0))",
        ("compute capability not supported", "10.3", "10.0"),
    ),
    "connector": (
        {"use_kv_connector": True},
        "supports_kv_connector = classmethod(lambda cls: False)",
        ("KV connector not supported", "use_kv_connector=True", "use_kv_connector=False"),
    ),
    "adaptive verification": (
        {"use_adaptive_verification": True},
        "is_ssm = classmethod(lambda cls: True)",
        (
            "device-cpu query lens mismatch not supported, "
            "this is needed for adaptive verification",
            "use_adaptive_verification=True",
            "use_adaptive_verification=False",
        ),
    ),
    "layout": (
        {"kv_cache_layout": "LBNHC"},
        "supported_kv_cache_layouts = classmethod(lambda cls: (KVCacheLayout.LBHNC,))",
        ("kv_cache_layout not supported", "LBNHC", "LBHNC"),
    ),
    "dcp": (
        {"use_dcp": True},
        "class NoDcp(Impl):\n    supports_dcp = False\n"
        "get_impl_cls = staticmethod(lambda: A.NoDcp)",
        ("DCP not supported", "use_dcp=True", "use_dcp=False"),
    ),
    "value head size": (
        {"head_size_v": 32},
        "class Fixed(Impl):\n    def __init__(self, num_heads, head_size, scale): ...\n"
        "get_impl_cls = staticmethod(lambda: A.Fixed)",
        ("value heads of another size not supported", "head_size_v=32", "head_size_v=64"),
    ),
    "combination": (
        {"has_sliding_window": True},
        "supports_sliding_window = classmethod(lambda cls: True)\n"
        "supports_combination = classmethod(lambda cls, *a, **k: 'only on Sundays')",
        ("only on Sundays", "", ""),
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_limit_is_stated_with_what_came_and_what_is_allowed(workshop, case) -> None:
    wish, body, expected = LIMITS[case]
    (reason,) = reasons_against(made(workshop, body), request(**wish))
    assert (reason, reason.got, reason.allowed) == expected


def test_the_contracts_reasons_come_first_and_in_its_order(workshop) -> None:
    wish = request(
        dtype=torch.float64, has_sink=True, has_sliding_window=True, use_alibi=True, use_dcp=True
    )
    assert list(reasons_against(made(workshop), wish)) == [
        "dtype not supported",
        "attention sinks not supported",
        "sliding window not supported",
        "ALiBi not supported",
    ]


OLDER = """
@classmethod
def validate_configuration(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink,
                           use_sparse, device_capability, attn_type):
    return ["sink"] if has_sink else []
"""


@pytest.mark.parametrize("flag", ["use_dcp", "has_sliding_window", "use_mm_prefix", "use_pcp"])
def test_an_older_argument_list_is_refused_for_a_wish_it_has_no_word_for(workshop, flag) -> None:
    cls = made(workshop, OLDER)
    assert reasons_against(cls, request()) == ()
    assert reasons_against(cls, request(has_sink=True)) == ("sink",)
    (reason,) = reasons_against(cls, request(**{flag: True}))
    assert f"does not take {flag}" in reason
    assert f"upgrade the backend, or ask without {flag}" in reason.remedy


def test_a_backend_with_an_older_argument_list_does_not_stop_the_others(workshop) -> None:
    registry = workshop.registry(
        workshop.plugin("old", {"OLD": OLDER}, info="priority=9"),
        workshop.plugin("new", {"NEW": ""}),
    )
    report = explain(request(use_dcp=True), registry=registry)
    assert report.chosen == "NEW"
    assert "does not take use_dcp" in report.verdict("OLD").reasons[0]
    assert (
        "validate_configuration does not take"
        in explain(request(), registry=registry).verdict("OLD").notes[0]
    )


def test_an_override_that_takes_any_keyword_gets_the_contracts_arguments(workshop) -> None:
    body = """
@classmethod
def validate_configuration(cls, **kwargs):
    cls.seen = kwargs
    return []
"""
    cls = made(workshop, body)
    assert reasons_against(cls, request()) == ()
    assert tuple(cls.seen) == CONTRACT_ARGUMENTS


def test_an_override_that_knows_a_later_flag_gets_it(workshop) -> None:
    arguments = ", ".join((*CONTRACT_ARGUMENTS, "use_rswa=False"))
    body = f"""
@classmethod
def validate_configuration(cls, {arguments}):
    cls.seen = use_rswa
    return []
"""
    cls = made(workshop, body)
    reasons_against(cls, request(use_rswa=True))
    assert cls.seen is True


def test_an_override_that_wants_an_unknown_argument_is_a_reason(workshop) -> None:
    body = "validate_configuration = classmethod(lambda cls, head_size, dtype, from_the_future: [])"
    reasons = reasons_against(made(workshop, body), request())
    assert "from_the_future" in reasons[-1]
    assert reasons[-1].traceback


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "@classmethod\ndef supports_dtype(cls, dtype):\n    raise RuntimeError('boom')",
            "supports_dtype of A raised RuntimeError: boom",
        ),
        (
            "@classmethod\ndef supports_sink(cls):\n    raise SystemExit(1)",
            "supports_sink of A raised SystemExit: 1",
        ),
        (
            "@classmethod\ndef supports_alibi(cls):\n    return 1 / 0",
            "supports_alibi of A raised ZeroDivisionError",
        ),
        (
            "@staticmethod\ndef get_name():\n    raise KeyError('name')",
            "get_name of A raised KeyError: 'name'",
        ),
        (
            "validate_configuration = classmethod(lambda cls, **k: None)",
            "validate_configuration answered None",
        ),
        (
            "validate_configuration = classmethod(lambda cls, **k: 'no')",
            "validate_configuration answered 'no'",
        ),
    ],
    ids=["raises", "exits", "raises in an addition", "get_name", "answers None", "answers text"],
)
def test_a_backend_that_fails_when_asked_is_refused_alone(workshop, body: str, text: str) -> None:
    registry = workshop.registry(
        workshop.plugin("bad", {"A": body}, info="priority=9"), workshop.plugin("good", {"B": ""})
    )
    wish = request(has_sink="supports_sink" in body, use_alibi="supports_alibi" in body)
    report = explain(wish, registry=registry)
    reasons = report.verdict("A").reasons
    assert any(text in reason for reason in reasons)
    if "raised" in text:
        assert any("Traceback" in reason.traceback for reason in reasons)
    if not wish.asked_features():
        assert report.chosen == "B"


def test_details_that_cannot_be_had_do_not_hide_the_reason(workshop) -> None:
    body = """
@classmethod
def supports_head_size(cls, head_size):
    return False
@classmethod
def get_supported_head_sizes(cls):
    raise RuntimeError("no list")
"""
    (reason,) = reasons_against(made(workshop, body), request())
    assert reason == "head_size not supported"
    assert "no list" in reason.allowed


def test_a_backend_for_another_device_is_refused_and_not_imported(workshop) -> None:
    point = workshop.plugin("gpu", {"G": ""}, info="device_types=('cuda',)")
    registry = workshop.registry(point, workshop.plugin("cpu", {"C": ""}))
    report = explain(request(), registry=registry)
    (reason,) = report.verdict("G").reasons
    assert (reason, reason.got, reason.allowed) == ("device type cpu not supported", "cpu", "cuda")
    module = registry.backends()["G"].info.class_path.partition(":")[0]
    assert module not in sys.modules
    assert select_backend(request(), registry=registry).get_name() == "C"


def test_a_gpu_that_is_not_here_is_asked_for_its_capability(workshop, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    registry = workshop.registry(workshop.plugin("gpu", {"G": ""}, info="device_types=('cuda',)"))
    (reason,) = explain(request(device="cuda"), registry=registry).verdict("G").reasons
    assert "capability of cuda is not known here" in reason
    assert "device_capability=(major, minor)" in reason.remedy
    named = request(device="cuda", device_capability=(9, 0))
    assert explain(named, registry=registry).chosen == "G"


def test_a_platform_of_a_plugin_gives_the_capability(workshop) -> None:
    hooks = "@hookimpl\ndef attnmux_platform():\n    return PlatformInfo('madeup', 'x', (7, 7))\n"
    body = "supports_compute_capability = classmethod(lambda cls, c: c == (7, 7))"
    registry = workshop.registry(
        workshop.plugin("one", {"A": body}, info="device_types=('madeup',)", hooks=hooks)
    )
    assert explain(request(device="madeup:0"), registry=registry).chosen == "A"
