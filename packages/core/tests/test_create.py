"""Making impls and builders: what is asked for is passed on or refused, never dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attnmux.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from attnmux.config import EngineConfig
from attnmux.create import create_builder, create_impl
from attnmux.kv_cache import FullAttentionSpec
from attnmux.plugins import BackendInfo, Registry

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
PLAIN: dict[str, Any] = {"num_heads": 4, "head_size": 8, "scale": 0.5, "num_kv_heads": 2}
SINKS = torch.zeros(4)
OPTIONS = object()


class Impl(AttentionImpl[Any]):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("not run here")


class Old(Impl):
    """Takes what the original interface has."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder",
        kv_sharing_target_layer_name=None,
    ):  # fmt: skip
        self.got = {k: v for k, v in locals().items() if k not in ("self", "__class__")}


class Small(Impl):
    """Takes less than that."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None):
        self.got = {k: v for k, v in locals().items() if k not in ("self", "__class__")}


class Open(Impl):
    """Takes anything."""

    def __init__(self, **kwargs: Any) -> None:
        self.got = kwargs


class Sinks(Impl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, sinks=None, options=None):
        self.got = {k: v for k, v in locals().items() if k not in ("self", "__class__")}


class Builder(AttentionMetadataBuilder[Any]):
    options: object = None

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False):
        return None


class BuilderWithOptions(Builder):
    def __init__(self, *args: Any, options: object = None) -> None:
        super().__init__(*args)
        self.options = options


def backend(impl_cls: type[Impl], builder_cls: type[Builder] = Builder) -> Any:
    members = {
        "get_name": staticmethod(lambda: "MINE"),
        "get_impl_cls": staticmethod(lambda: impl_cls),
        "get_builder_cls": staticmethod(lambda: builder_cls),
    }
    return type("Mine", (AttentionBackend,), members)


NOTHING_ASKED: dict[str, Any] = {
    "sinks": None,
    "use_alibi_sqrt": False,
    "head_size_v": None,
    "options": None,
    "alibi_slopes": None,
    "sliding_window": None,
    "logits_soft_cap": None,
    "kv_sharing_target_layer_name": None,
}
ASKED: dict[str, Any] = {
    "sinks": SINKS,
    "use_alibi_sqrt": True,
    "head_size_v": 4,
    "options": OPTIONS,
    "alibi_slopes": [0.5] * 4,
    "sliding_window": 8,
    "logits_soft_cap": 30.0,
    "kv_sharing_target_layer_name": "layer.0",
}


@pytest.mark.parametrize("impl_cls", [Small, Old, Sinks, Open])
def test_keywords_that_ask_for_nothing_are_left_out_where_not_taken(impl_cls: type[Any]) -> None:
    made: Any = create_impl(backend(impl_cls), **PLAIN, **NOTHING_ASKED)
    assert type(made) is impl_cls
    assert {name: made.got[name] for name in PLAIN} == PLAIN


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for_and_not_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got .*; allowed: nothing: MINE does not take"):
        create_impl(backend(Small), **PLAIN, **{name: ASKED[name]})


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for_and_taken_is_passed_on(name: str) -> None:
    made: Any = create_impl(backend(Open), **PLAIN, **{name: ASKED[name]})
    assert made.got[name] is ASKED[name]


def test_an_extra_keyword_reaches_the_impl_that_names_it() -> None:
    made: Any = create_impl(backend(Sinks), **PLAIN, sinks=SINKS, use_alibi_sqrt=False)
    assert made.got["sinks"] is SINKS


def test_the_values_of_a_refused_tensor_are_not_printed() -> None:
    with pytest.raises(ValueError, match=r"sinks: got a tensor \[4\]; allowed"):
        create_impl(backend(Old), **PLAIN, sinks=torch.zeros(4, device="meta"))


@pytest.mark.parametrize("value", [4, None])
def test_a_keyword_that_nobody_knows_is_refused_even_when_it_is_none(value: int | None) -> None:
    with pytest.raises(ValueError, match=f"window_size: got {value}; allowed: nothing"):
        create_impl(backend(Old), **PLAIN, window_size=value)


def test_options_go_to_impl_and_builder_as_each_takes_them() -> None:
    in_builder = backend(Old, BuilderWithOptions)
    assert "options" not in create_impl(in_builder, **PLAIN, options=OPTIONS).got  # type: ignore[attr-defined]
    made: Any = create_builder(in_builder, SPEC, ["a"], EngineConfig(), "cpu", OPTIONS)
    assert made.options is OPTIONS
    in_impl = backend(Sinks)
    assert create_impl(in_impl, **PLAIN, options=OPTIONS).got["options"] is OPTIONS  # type: ignore[attr-defined]
    assert create_builder(in_impl, SPEC, ["a"], EngineConfig(), "cpu", OPTIONS).layer_names == ["a"]


def test_options_that_nobody_takes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"options: got .*; allowed: None \(MINE takes no options"):
        create_builder(backend(Old), SPEC, ["a"], EngineConfig(), "cpu", OPTIONS)


def test_a_builder_gets_a_device_whatever_names_it() -> None:
    config = EngineConfig()
    made = create_builder(backend(Old), SPEC, ["a", "b"], config, "meta")
    assert made.device == torch.device("meta")
    assert (made.kv_cache_spec, made.layer_names, made.vllm_config) == (SPEC, ["a", "b"], config)


@dataclass(frozen=True)
class Options:
    splits: int = 4


@pytest.fixture
def with_options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """MINE, installed by a plugin that names its options; impl and builder take them."""
    registry = Registry(lambda: [])
    registry.register(BackendInfo("MINE", "m:X", options=Options))
    registry.register(BackendInfo("MINE_TOO", "m:Y", options=Options))
    monkeypatch.setattr("attnmux.options.get_registry", lambda: registry)
    return backend(Sinks, BuilderWithOptions)


def test_options_of_the_environment_are_heard_though_the_engine_gave_none(
    with_options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNMUX_OPT_MINE_SPLITS", "9")
    impl: Any = create_impl(with_options, **PLAIN)
    builder: Any = create_builder(with_options, SPEC, ["a"], EngineConfig(), "cpu")
    assert impl.got["options"] == builder.options == Options(splits=9)


def test_options_that_an_engine_gives_are_stronger_than_the_environment(
    with_options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNMUX_OPT_MINE_SPLITS", "9")
    impl: Any = create_impl(with_options, **PLAIN, options=Options(splits=2))
    assert impl.got["options"] == Options(splits=2)


def test_options_of_a_backend_with_a_longer_name_are_not_taken(
    with_options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNMUX_OPT_MINE_TOO_SPLITS", "9")
    impl: Any = create_impl(with_options, **PLAIN)
    assert impl.got["options"] is None


def test_an_option_of_the_environment_that_cannot_be_read_is_an_error(
    with_options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNMUX_OPT_MINE_SPLITS", "many")
    with pytest.raises(ValueError, match="ATTNMUX_OPT_MINE_SPLITS: got 'many'; allowed: an int"):
        create_builder(with_options, SPEC, ["a"], EngineConfig(), "cpu")


@pytest.mark.parametrize("options", [{"splits": 2}, OPTIONS], ids=["dict", "object"])
def test_options_of_another_class_are_refused(with_options: Any, options: object) -> None:
    with pytest.raises(ValueError, match=r"options: got .*; allowed: Options, as attnmux.resolve"):
        create_impl(with_options, **PLAIN, options=options)


def test_a_name_in_place_of_a_backend_is_refused() -> None:
    name: Any = "CPU_ATTN"
    with pytest.raises(ValueError, match="backend: got 'CPU_ATTN'; allowed: the class of a back"):
        create_impl(name, **PLAIN)
    with pytest.raises(ValueError, match="backend: got 'CPU_ATTN'; allowed: the class of a back"):
        create_builder(name, SPEC, ["a"], EngineConfig(), "cpu")


def test_a_misspelt_keyword_gets_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"sliding_windw: got 3; .*did you mean sliding_window\?"):
        create_impl(backend(Old), **PLAIN, sliding_windw=3)
