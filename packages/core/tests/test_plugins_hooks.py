"""Hooks beside attnmux_backends: another order, new cache dtypes, a device, and tracing."""

from __future__ import annotations

import pytest
import torch

from attnmux.kv_cache import cache_dtype_handler
from attnmux.plugins import FailureKind
from attnmux.request import AttentionRequest

REQUEST = AttentionRequest(head_size=64, dtype=torch.float16)


def infos(registry):
    return [entry.info for entry in registry.entries() if entry.info]


def test_rank_takes_the_first_answer_in_the_order_of_names(workshop) -> None:
    registry = workshop.registry(
        workshop.plugin("b", {"B": ""}, hooks="@hookimpl\ndef attnmux_rank():\n    return ['B']\n"),
        workshop.plugin(
            "a",
            {"A": ""},
            hooks="@hookimpl\ndef attnmux_rank(request, candidates):\n    return None\n",
        ),
        workshop.plugin("c", {"C": ""}, hooks="@hookimpl\ndef attnmux_rank():\n    return ['C']\n"),
    )
    answer = registry.rank(REQUEST, infos(registry))
    assert answer.order == ("B",)
    assert answer.origin.entry_point == "b"
    assert answer.failures == ()


def test_tryfirst_comes_before_the_order_of_names(workshop) -> None:
    registry = workshop.registry(
        workshop.plugin("a", {"A": ""}, hooks="@hookimpl\ndef attnmux_rank():\n    return ['A']\n"),
        workshop.plugin(
            "z",
            {"Z": ""},
            hooks="@hookimpl(tryfirst=True)\ndef attnmux_rank():\n    return ['Z']\n",
        ),
    )
    assert registry.rank(REQUEST, infos(registry)).order == ("Z",)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("return 'A'", FailureKind.BAD_ANSWER, "answered 'A'"),
        (
            "return ['STRANGER']",
            FailureKind.BAD_ANSWER,
            "named 'STRANGER'; allowed: the candidates",
        ),
        ("return []", FailureKind.BAD_ANSWER, "answered []"),
        ("raise RuntimeError('no')", FailureKind.RAISED, "attnmux_rank raised RuntimeError: no"),
    ],
)
def test_a_bad_rank_is_a_failure_and_the_next_plugin_is_asked(
    workshop, body: str, kind: FailureKind, text: str
) -> None:
    registry = workshop.registry(
        workshop.plugin("a", {"A": ""}, hooks=f"@hookimpl\ndef attnmux_rank():\n    {body}\n"),
        workshop.plugin("b", {"B": ""}, hooks="@hookimpl\ndef attnmux_rank():\n    return ['B']\n"),
    )
    answer = registry.rank(REQUEST, infos(registry))
    assert answer.order == ("B",)
    (failure,) = answer.failures
    assert failure.kind == kind
    assert text in failure.message


def test_cache_dtypes_of_a_plugin_become_known(workshop) -> None:
    hooks = """
        @hookimpl
        def attnmux_kv_cache_dtypes():
            import torch
            from attnmux.kv_cache import CacheDTypeHandler, KVQuantMode
            return [CacheDTypeHandler("made_up_dtype", torch.uint8, KVQuantMode.NONE)]
    """
    registry = workshop.registry(workshop.plugin("a", {"A": ""}, hooks=hooks))
    registry.entries()
    assert registry.failures() == ()
    assert cache_dtype_handler("made_up_dtype").storage_dtype == torch.uint8


def test_an_unknown_cache_dtype_is_looked_for_among_the_plugins(workshop, monkeypatch) -> None:
    hooks = """
        @hookimpl
        def attnmux_kv_cache_dtypes():
            import torch
            from attnmux.kv_cache import CacheDTypeHandler, KVQuantMode
            return [CacheDTypeHandler("asked_for_dtype", torch.uint8, KVQuantMode.NONE)]
    """
    registry = workshop.registry(workshop.plugin("a", {"A": ""}, hooks=hooks))
    monkeypatch.setattr("attnmux.plugins.get_registry", lambda: registry)
    assert cache_dtype_handler("asked_for_dtype").storage_dtype == torch.uint8


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return ['fp3']", "answered 'fp3' in its list; allowed: CacheDTypeHandler"),
        ("return None", "answered None"),
        ("raise OSError('no')", "attnmux_kv_cache_dtypes raised OSError: no"),
    ],
)
def test_bad_cache_dtypes_are_a_failure_and_the_backends_stay(workshop, body, text) -> None:
    hooks = f"@hookimpl\ndef attnmux_kv_cache_dtypes():\n    {body}\n"
    registry = workshop.registry(workshop.plugin("a", {"A": ""}, hooks=hooks))
    assert registry.backends()["A"].usable
    (failure,) = registry.failures()
    assert text in failure.message


def test_a_platform_that_the_core_does_not_know(workshop) -> None:
    hooks = """
        @hookimpl
        def attnmux_platform():
            return PlatformInfo("npu", "some chip", (2, 1))
    """
    platform, failures = workshop.registry(workshop.plugin("a", {"A": ""}, hooks=hooks)).platform()
    assert (platform.device_type, platform.capability, failures) == ("npu", (2, 1), ())


def test_a_platform_hook_that_answers_nonsense_is_a_failure(workshop) -> None:
    hooks = "@hookimpl\ndef attnmux_platform():\n    return 'npu'\n"
    platform, failures = workshop.registry(workshop.plugin("a", {"A": ""}, hooks=hooks)).platform()
    assert platform is None
    assert "allowed: PlatformInfo" in failures[0].message


def test_tracing_prints_each_hook_call_to_stderr(workshop, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ATTNMUX_TRACE_PLUGINS", "1")
    workshop.registry(workshop.plugin("one", {"A": ""})).entries()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "attnmux trace: attnmux_backends()" in captured.err
    assert "implemented by one" in captured.err
    assert "attnmux-one 1.0" in captured.err
    assert "result: [[BackendInfo(name='A'" in captured.err
