"""What a metadata builder may read of the engine's settings.

Each class is a frozen dataclass with defaults, so ``EngineConfig()`` is enough for a test; each has
a Protocol beside it with the same fields, so that an engine passes its own object as it is. Field
names are those that builders of the contract read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class ModelConfig:
    """The model as attention sees it. Sizes are those of one rank."""

    dtype: torch.dtype = torch.bfloat16
    max_model_len: int = 8192
    """Longest request in tokens, prompt and answer together."""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    rswa_window: int | None = None
    """Window in tokens of reference sliding-window attention; None where the model has none."""


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks share the work, and how keys are dealt to context-parallel ranks."""

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    """Consecutive tokens that one context-parallel rank keeps before the next rank's turn."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: how many tokens a draft proposes."""

    num_speculative_tokens: int | None = None
    parallel_drafting: bool = False


@dataclass(frozen=True)
class SchedulerConfig:
    """Upper bounds of one step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache as the engine set it up."""

    block_size: int = 16
    cache_dtype: str = "auto"
    num_blocks: int | None = None


@dataclass(frozen=True)
class CompilationConfig:
    """Graph capture: which numbers of tokens are captured."""

    cudagraph_capture_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineConfig:
    """Everything a builder is given; stands where the contract says ``vllm_config``."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    speculative_config: SpeculativeConfig | None = None
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)


class ModelConfigLike(Protocol):
    """An engine's model settings. Builders read others through `getattr` with a default."""

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def max_model_len(self) -> int: ...  # noqa: D102


class ParallelConfigLike(Protocol):
    """An engine's parallel settings."""

    @property
    def decode_context_parallel_size(self) -> int: ...  # noqa: D102


class SpeculativeConfigLike(Protocol):
    """An engine's speculative-decoding settings."""

    @property
    def num_speculative_tokens(self) -> int | None: ...  # noqa: D102
    @property
    def parallel_drafting(self) -> bool: ...  # noqa: D102


class SchedulerConfigLike(Protocol):
    """An engine's bounds of one step."""

    @property
    def max_num_seqs(self) -> int: ...  # noqa: D102
    @property
    def max_num_batched_tokens(self) -> int: ...  # noqa: D102


class EngineConfigLike(Protocol):
    """An engine's settings object, passed to builders as it is."""

    @property
    def model_config(self) -> ModelConfigLike: ...  # noqa: D102
    @property
    def parallel_config(self) -> ParallelConfigLike: ...  # noqa: D102
    @property
    def speculative_config(self) -> SpeculativeConfigLike | None: ...  # noqa: D102
    @property
    def scheduler_config(self) -> SchedulerConfigLike: ...  # noqa: D102
