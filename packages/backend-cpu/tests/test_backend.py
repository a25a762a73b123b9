"""What CPU_ATTN declares, and that the plugin leads to it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attnmux.backend import AttentionType, DeviceCapability
from attnmux_cpu.backend import CPUAttentionBackend
from attnmux_cpu.options import CPUAttentionOptions, CPUMLAOptions
from attnmux_cpu.plugin import attnmux_backends


def _reasons(**changes):
    request = {
        "head_size": 64,
        "dtype": torch.float32,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": True,
        "use_per_head_quant_scales": True,
        "device_capability": DeviceCapability(0, 0),
        "attn_type": AttentionType.DECODER,
        "has_sliding_window": True,
        "use_non_causal": True,
        "use_kv_connector": True,
        "use_adaptive_verification": True,
    }
    return CPUAttentionBackend.validate_configuration(**(request | changes))


@pytest.mark.parametrize("attn_type", list(AttentionType))
@pytest.mark.parametrize("head_size", [1, 3, 40, 80, 128, 576])
@pytest.mark.parametrize("block_size", [None, 1, 12, 16, 528])
def test_everything_at_once_is_supported(attn_type, head_size, block_size):
    assert not _reasons(attn_type=attn_type, head_size=head_size, block_size=block_size)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "kv_cache_dtype not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"attn_type": "sideways"}, "attention type sideways not supported"),
    ],
)
def test_what_is_declined_has_its_reason(changes, reason):
    assert _reasons(**changes) == [reason]


def test_what_the_classes_declare():
    backend, impl = CPUAttentionBackend, CPUAttentionBackend.get_impl_cls()
    assert backend.get_name() == "CPU_ATTN"
    assert not backend.forward_includes_kv_cache_update
    assert backend.supported_kv_cache_layouts() is None
    assert all(
        getattr(backend, f"supports_{name}")()
        for name in (
            "alibi",
            "alibi_sqrt",
            "logits_soft_cap",
            "rswa",
            "per_request_causal",
            "lse",
            "kv_sharing",
            "device_cpu_query_lens_mismatch",
        )
    )
    assert impl.can_return_lse_for_decode
    assert impl.lse_base_on_e
    assert not impl.supports_dcp


def test_the_plugin_names_backends_and_options_that_are_there():
    from pydoc import locate

    infos = {info.name: info for info in attnmux_backends()}
    assert not any(info.problems() for info in infos.values())
    for info in infos.values():
        backend = locate(info.class_path.replace(":", "."))
        assert backend.get_name() == info.name
        assert info.device_types == ("cpu",)
    options = {name: locate(info.options.replace(":", ".")) for name, info in infos.items()}
    assert options == {
        "CPU_ATTN": CPUAttentionOptions,
        "CPU_MLA": CPUMLAOptions,
        "CPU_MLA_SPARSE": CPUMLAOptions,
    }


def test_the_plugin_module_imports_no_torch():
    code = (
        "import sys, attnmux_cpu.plugin as p; p.attnmux_backends(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
