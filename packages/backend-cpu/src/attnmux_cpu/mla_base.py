"""What dense and sparse latent attention share: the layer's sizes, checks, the cache write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from attnmux.backend import AttentionType, KVQuantMode, MLAAttentionImpl
from attnmux.checks import (
    bad_argument,
    check_in,
    check_index_dtype,
    check_positive,
    check_scale,
    check_tensor,
)
from attnmux.kv_cache import cache_dtype_handler
from attnmux_cpu.kernels.cache_rows import RowFormat, encode_rows, write_rows
from attnmux_cpu.kernels.mla_cache import LatentCache, check_block_table
from attnmux_cpu.kernels.workspace import thread_workspace
from attnmux_cpu.mla_builder import CPUMLAMetadata
from attnmux_cpu.options import CPUMLAOptions, check_options

MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

M = TypeVar("M", bound=CPUMLAMetadata)


class LatentImpl(MLAAttentionImpl[M]):
    """Impl of one layer, without its two forward methods."""

    can_return_lse_for_decode = True
    supports_pcp = False
    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Callable[[torch.Tensor], Any],
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
        options: CPUMLAOptions | None = None,
    ) -> None:
        """Keep the layer's sizes; arguments are those of the contract.

        Raises:
            ValueError: Sizes that do not go together, or a feature that latent attention has not.
        """
        _refuse_features(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )
        check_in("attn_type", attn_type, [AttentionType.DECODER])
        _refuse_context_parallelism(self.dcp_world_size, self.pcp_world_size)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = check_scale(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_head_dim
        self.v_head_dim = v_head_dim
        self.kv_b_proj = kv_b_proj
        self.indexer = indexer
        self.q_pad_num_heads = q_pad_num_heads
        self.options = check_options(options, CPUMLAOptions)
        self._check_sizes(num_kv_heads)
        self._check_indexer()
        self._handler = cache_dtype_handler(kv_cache_dtype)
        if self._handler.quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR) or (
            self._handler.row_size is not None
        ):
            raise bad_argument("kv_cache_dtype", repr(kv_cache_dtype), "plain or fp8 per tensor")

    def _check_sizes(self, num_kv_heads: int) -> None:
        for name in (
            "num_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        ):
            check_positive(name, getattr(self, name))
        check_in("num_kv_heads", num_kv_heads, [1])
        row = self.kv_lora_rank + self.qk_rope_head_dim
        if self.head_size != row:
            raise bad_argument(
                "head_size", self.head_size, f"{row} (kv_lora_rank + qk_rope_head_dim)"
            )
        head = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.qk_head_dim != head:
            raise bad_argument(
                "qk_head_dim", self.qk_head_dim, f"{head} (qk_nope_head_dim + qk_rope_head_dim)"
            )
        if not callable(self.kv_b_proj):
            raise bad_argument("kv_b_proj", type(self.kv_b_proj).__name__, "a callable")
        padded = self.q_pad_num_heads
        if padded is not None and not (isinstance(padded, int) and padded >= self.num_heads):
            raise bad_argument("q_pad_num_heads", padded, f"None or at least {self.num_heads}")

    def _check_indexer(self) -> None:
        """Refuse an indexer where none is used, or the lack of one."""
        raise NotImplementedError

    @torch.no_grad()
    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write one row a token; arguments as in the contract.

        Slots may be fewer than rows, whose rest is ignored; -1 is not written.

        Raises:
            ValueError: An argument does not fit, or a slot is outside of the cache; nothing was
                written.
        """
        check_tensor("kv_cache", kv_cache)
        if kv_cache.numel() == 0:
            return
        check_in("kv_cache_dtype", kv_cache_dtype, [self.kv_cache_dtype])
        rotary = self.check_latents(kv_c_normed, k_pe)
        self._check_cache("kv_cache", kv_cache, kv_c_normed.dtype)
        scale = torch.tensor([self._cache_scale(k_scale)], dtype=torch.float32, device="cpu")
        slots = _check_slots(slot_mapping, kv_c_normed.shape[0], kv_cache)
        written = (slots >= 0).nonzero().flatten()
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        row = RowFormat(rank, rope, rank + rope, kv_cache.dtype, self._handler.quant_mode)
        rows = encode_rows(kv_c_normed[written, None], rotary[written, None], row, scale, scale)
        write_rows(kv_cache, rows, slots[written])

    def check_latents(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        """Return the rotated parts as ``[num_tokens, rope]``."""
        check_tensor(
            "kv_c_normed",
            kv_c_normed,
            shape=("num_tokens", self.kv_lora_rank),
            dtype=MODEL_DTYPES,
            device="cpu",
        )
        check_tensor("k_pe", k_pe)
        num_tokens, rope = kv_c_normed.shape[0], self.qk_rope_head_dim
        shape = (num_tokens, 1, rope) if k_pe.dim() == 3 else (num_tokens, rope)
        check_tensor("k_pe", k_pe, shape=shape, dtype=kv_c_normed.dtype, device="cpu")
        return k_pe[:, 0] if k_pe.dim() == 3 else k_pe

    def _check_cache(self, name: str, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> None:
        check_tensor(
            name,
            kv_cache,
            shape=("num_blocks", 1, "block_size", self.head_size),
            dtype=self._handler.resolve_storage_dtype(model_dtype),
            device="cpu",
            last_dim_contiguous=True,
        )

    def _cache_scale(self, k_scale: torch.Tensor | None) -> float:
        """Return the factor of stored values."""
        if self._handler.quant_mode == KVQuantMode.NONE:
            return 1.0
        check_tensor("k_scale", k_scale, dtype=torch.float32, device="cpu")
        assert isinstance(k_scale, torch.Tensor)
        if k_scale.numel() != 1:
            raise bad_argument("k_scale.shape", list(k_scale.shape), "a single element")
        return float(k_scale)

    def scale_of(self, layer: object) -> torch.Tensor | None:
        """Return the layer's `_k_scale`; a cache that is not quantised needs none."""
        return getattr(layer, "_k_scale", None)

    def open_cache(
        self,
        kv_cache: torch.Tensor,
        metadata: M,
        model_dtype: torch.dtype,
        k_scale: torch.Tensor | None,
    ) -> LatentCache:
        """Check a cache and the batch's blocks of it, and return it ready to be read."""
        self._check_cache("kv_c_and_k_pe_cache", kv_cache, model_dtype)
        num_blocks, _, block_size, _ = kv_cache.shape
        if (num_blocks, block_size) not in metadata.fitting_caches:
            check_block_table(metadata.block_table, metadata.num_cached, num_blocks, block_size)
            metadata.fitting_caches.add((num_blocks, block_size))
        scale = self._cache_scale(k_scale)
        return LatentCache(kv_cache, metadata.block_table, scale, thread_workspace())

    def check_query(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], metadata: M
    ) -> tuple[torch.Tensor, ...]:
        """Return the parts of an absorbed query, without heads that only pad it."""
        if not isinstance(q, (torch.Tensor, tuple, list)):
            raise bad_argument("q", type(q).__name__, "a tensor | a pair (latent, rotary)")
        tensors: tuple[torch.Tensor, ...] = (q,) if isinstance(q, torch.Tensor) else tuple(q)
        if isinstance(q, torch.Tensor):
            names, widths = ["q"], [self.head_size]
        else:
            names, widths = ["q[0]", "q[1]"], [self.kv_lora_rank, self.qk_rope_head_dim]
        if len(tensors) != len(names):
            raise bad_argument("q", f"{len(tensors)} parts", "a tensor | a pair (latent, rotary)")
        first = tensors[0]
        allowed = sorted({self.num_heads, self.q_pad_num_heads or self.num_heads})
        for name, part, width in zip(names, tensors, widths, strict=True):
            shape = ("num_tokens", "num_heads", width)
            check_tensor(name, part, shape=shape, dtype=MODEL_DTYPES, device="cpu")
            check_in(f"{name}.shape[1]", part.shape[1], allowed)
            check_num_rows(name, part, metadata.num_decode_tokens)
            if part.shape[:2] != first.shape[:2] or part.dtype != first.dtype:
                got = f"{list(part.shape)} {part.dtype}"
                want = f"tokens, heads and dtype of q[0]: {list(first.shape)} {first.dtype}"
                raise bad_argument(name, got, want)
        return tuple(part[:, : self.num_heads] for part in tensors)

    def padded(
        self,
        output: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the heads that only pad the query a result too: that of seeing nothing."""
        extra = (q if isinstance(q, torch.Tensor) else q[0]).shape[1] - self.num_heads
        if not extra:
            return output, lse
        pad = torch.nn.functional.pad
        return pad(output, (0, 0, 0, extra)), pad(lse, (0, extra), value=-torch.inf)


def _refuse_features(**features: object) -> None:
    for name, value in features.items():
        if value is not None:
            raise bad_argument(name, value, "None: latent attention has no such feature here")


def _refuse_context_parallelism(dcp_world_size: int, pcp_world_size: int) -> None:
    sizes = {
        "decode_context_parallel_size": dcp_world_size,
        "prefill_context_parallel_size": pcp_world_size,
    }
    for name, size in sizes.items():
        check_in(name, size, [1])


def check_metadata(metadata: object, wanted: type[CPUMLAMetadata]) -> None:
    """Raise `ValueError` unless `metadata` is what this backend's builder makes."""
    if not isinstance(metadata, wanted):
        raise bad_argument("attn_metadata", type(metadata).__name__, wanted.__name__)


def check_num_rows(name: str, tensor: torch.Tensor, at_least: int) -> None:
    """Raise `ValueError` unless there is a row for each of the batch's tokens."""
    if tensor.shape[0] < at_least:
        raise bad_argument(f"{name}.shape[0]", tensor.shape[0], f"at least {at_least} tokens")


def _check_slots(slots: torch.Tensor, num_rows: int, kv_cache: torch.Tensor) -> torch.Tensor:
    """Return the slots as int64, flat, all within the cache or -1."""
    check_tensor("slot_mapping", slots, device="cpu")
    slots = slots.flatten()
    check_index_dtype("slot_mapping", slots)
    if slots.numel() > num_rows:
        raise bad_argument("slot_mapping.shape", list(slots.shape), f"at most {num_rows} slots")
    num_slots = kv_cache.shape[0] * kv_cache.shape[2]
    wrong = ((slots < -1) | (slots >= num_slots)).nonzero().flatten()
    if wrong.numel():
        place = int(wrong[0])
        raise bad_argument(
            f"slot_mapping[{place}]", int(slots[place]), f"-1 or a slot below {num_slots}"
        )
    return slots.long()
