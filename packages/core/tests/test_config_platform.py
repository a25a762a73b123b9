"""Settings that builders read, and the device in hand."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux import config
from attnmux.backend import DeviceCapability
from attnmux.config import (
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from attnmux.platform import CPU_CAPABILITY, default_device, device_capability

CONFIGS = [
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
]


@pytest.mark.parametrize("cls", CONFIGS)
def test_settings_have_defaults_and_cannot_be_changed(cls: type[Any]) -> None:
    made = cls()
    assert made == cls()
    field = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, field, None)


def test_defaults_describe_one_process_without_speculation() -> None:
    settings = EngineConfig()
    assert settings.speculative_config is None
    assert settings.parallel_config.decode_context_parallel_size == 1
    assert settings.parallel_config.prefill_context_parallel_size == 1
    assert settings.parallel_config.cp_kv_cache_interleave_size == 1
    assert settings.model_config.rswa_window is None
    assert settings.cache_config.cache_dtype == "auto"


def test_replaced_settings_leave_the_first_alone() -> None:
    first = EngineConfig()
    second = dataclasses.replace(first, model_config=ModelConfig(rswa_window=128))
    assert (first.model_config.rswa_window, second.model_config.rswa_window) == (None, 128)


PAIRS = [
    (config.ModelConfigLike, ModelConfig()),
    (config.ParallelConfigLike, ParallelConfig()),
    (config.SpeculativeConfigLike, SpeculativeConfig(3)),
    (config.SchedulerConfigLike, SchedulerConfig()),
    (config.EngineConfigLike, EngineConfig()),
]


@pytest.mark.parametrize(("protocol", "made"), PAIRS, ids=lambda value: type(value).__name__)
def test_each_dataclass_answers_its_protocol(protocol: type[Any], made: object) -> None:
    names = {name for name in vars(protocol) if not name.startswith("_")}
    assert names, "a protocol that asks nothing proves nothing"
    assert typing.is_protocol(protocol) if hasattr(typing, "is_protocol") else protocol._is_protocol
    assert names <= {field.name for field in dataclasses.fields(made)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "version", "number"),
    [((8, 0), "8.0", 80), ((8, 9), "8.9", 89), ((12, 1), "12.1", 121)],
)
def test_a_capability_is_written_in_two_ways(
    capability: tuple[int, int], version: str, number: int
) -> None:
    made = DeviceCapability(*capability)
    assert (made.as_version_str(), made.to_int()) == (version, number)


def test_capabilities_are_ordered_by_both_numbers() -> None:
    # B90: the major number alone does not tell siblings apart.
    ordered = [
        DeviceCapability(*c) for c in [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    ]
    assert all(lower < higher for lower, higher in itertools.pairwise(ordered))
    assert len(set(ordered)) == len(ordered)
    assert DeviceCapability(10, 0) == (10, 0)
    assert DeviceCapability(10, 0) < DeviceCapability(10, 3)


@pytest.mark.parametrize("minor", [-1, 10])
def test_a_minor_number_of_two_digits_has_no_short_form(minor: int) -> None:
    with pytest.raises(ValueError, match="minor: got"):
        DeviceCapability(8, minor).to_int()


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")], ids=str)
def test_devices_without_a_capability_have_the_lowest(device: torch.device | str) -> None:
    assert device_capability(device) == CPU_CAPABILITY == (0, 0)


def test_a_gpu_that_cannot_be_seen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device: got cuda:1; allowed: .*it sees 0 GPUs"):
        device_capability("cuda:1")
    assert default_device() == torch.device("cpu")


def test_the_capability_of_a_gpu_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return (9, 0)

    fake = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_capability=capability
    )
    monkeypatch.setattr(torch, "cuda", fake)
    assert device_capability("cuda:1") == DeviceCapability(9, 0)
    assert asked == [torch.device("cuda:1")]
    assert default_device() == torch.device("cuda:0")


def test_a_gpu_past_the_last_one_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    monkeypatch.setattr(torch, "cuda", fake)
    with pytest.raises(ValueError, match=r"device: got cuda:1; allowed: .*it sees 1 GPUs"):
        device_capability("cuda:1")
