"""Once a layer: check what came, then compute."""

from __future__ import annotations

import torch
from attnmux.backend import AttentionImpl, AttentionLayer, AttentionType
from attnmux.checks import (
    bad_argument,
    check_head_counts,
    check_in,
    check_index_dtype,
    check_tensor,
)

from attnmux_hello.builder import HelloMetadata, RequestSlice


class HelloImpl(AttentionImpl[HelloMetadata]):
    """Attention of one layer, request by request, with all scores of a request in memory."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Keep the layer's constants.

        Raises:
            ValueError: The heads do not divide, or the layer asks for what is not declared.
        """
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        check_head_counts(self.num_heads, self.num_kv_heads)
        check_in("attn_type", attn_type, [AttentionType.DECODER])
        check_in("kv_cache_dtype", kv_cache_dtype, ["auto"])
        declined = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        for name, value in declined.items():
            if value is not None:
                raise bad_argument(name, value, "None (not offered)")

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the keys and values of this step into the cache.

        Args:
            layer: The layer's scales; a cache of the model's dtype has none.
            key: [num_tokens, num_kv_heads, head_size].
            value: Like `key`.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], any strides.
            slot_mapping: Integer [<= num_tokens]: block * block_size + offset of each token; a
                token with slot -1, or with none, is not written.

        Raises:
            ValueError: A shape, dtype, device or slot is not what the cache takes.
        """
        self._check_cache(kv_cache)
        for name, tensor in (("key", key), ("value", value)):
            shape = ("num_tokens", self.num_kv_heads, self.head_size)
            check_tensor(name, tensor, shape=shape, dtype=kv_cache.dtype, device="cpu")
        check_tensor("slot_mapping", slot_mapping, shape=("num_tokens",), device="cpu")
        check_index_dtype("slot_mapping", slot_mapping)
        num_blocks, _, block_size, _ = kv_cache.shape
        tokens = (slot_mapping >= 0).nonzero().flatten()
        slots = slot_mapping[tokens].long()
        if slots.numel() and int(slots.max()) >= num_blocks * block_size:
            raise bad_argument(
                "slot_mapping", int(slots.max()), f"slots below {num_blocks * block_size}"
            )
        num_rows = min(key.shape[0], value.shape[0])
        if tokens.numel() and int(tokens[-1]) >= num_rows:
            raise bad_argument("slot_mapping", f"slots for {int(tokens[-1]) + 1} tokens", num_rows)
        content = torch.cat([key[tokens], value[tokens]], dim=-1)  # [tokens, num_kv_heads, content]
        kv_cache[slots // block_size, :, slots % block_size] = content

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HelloMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache, which holds this step's keys already, and fill `output`.

        Args:
            layer: Not read.
            query: [num_tokens, num_heads, head_size], or its last two dimensions flattened.
            key: Not read: the cache has it.
            value: Not read: the cache has it.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], any strides.
            attn_metadata: The schedule of this step.
            output: Like `query`; written in place.
            output_scale: Must be None: the output is not quantised.
            output_block_scale: Must be None.

        Returns:
            `output`.

        Raises:
            ValueError: A shape, dtype or device is wrong; nothing has been written then.
        """
        if output_scale is not None or output_block_scale is not None:
            raise bad_argument("output_scale", "a scale", "None (not offered)")
        self._check_cache(kv_cache)
        num_tokens = attn_metadata.num_actual_tokens
        query_rows = self._rows("query", query, kv_cache, num_tokens)
        output_rows = self._rows("output", output, kv_cache, num_tokens)
        served = 0
        for request in attn_metadata.requests:
            blocks = self._blocks(kv_cache, attn_metadata.block_table, request)
            attended = self._attend(query_rows[request.tokens], blocks, request.seq_len)
            output_rows[request.tokens] = attended.to(output.dtype)
            served = request.tokens.stop
        output_rows[served:num_tokens] = 0  # rows of padding
        return output

    def _attend(self, query: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
        """Return float32 [query_len, num_heads, head_size]: the place for your kernel.

        `query` is [query_len, num_heads, head_size], `blocks` [blocks, num_kv_heads, block_size,
        2 * head_size]. The tail of the last block is cut off: nobody wrote it, it may hold NaN.
        """
        query_len = query.shape[0]
        content = blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len].float()
        keys = content[..., : self.head_size]  # [num_kv_heads, seq_len, head_size]
        values = content[..., self.head_size :]
        # The query heads of one KV head become more rows of the same product.
        grouped = query.float().reshape(query_len, self.num_kv_heads, -1, self.head_size)
        grouped = grouped.permute(1, 2, 0, 3)  # [num_kv_heads, group, query_len, head_size]
        scores = self.scale * (grouped @ keys.unsqueeze(1).mT)  # [..., query_len, seq_len]
        query_pos = torch.arange(seq_len - query_len, seq_len)
        hidden = torch.arange(seq_len) > query_pos[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        # A row that sees no key comes out of softmax as NaN; its answer is 0.
        weights = weights.masked_fill(hidden, 0.0)
        return (weights @ values.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)

    def _blocks(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, request: RequestSlice
    ) -> torch.Tensor:
        """Gather the blocks of a request, and no entry past its length."""
        num_blocks = -(-request.seq_len // kv_cache.shape[2])
        return kv_cache[block_table[request.index, :num_blocks].long()]

    def _check_cache(self, kv_cache: torch.Tensor) -> None:
        shape = ("num_blocks", self.num_kv_heads, "block_size", 2 * self.head_size)
        dtypes = (torch.float32, torch.bfloat16)
        check_tensor("kv_cache", kv_cache, shape=shape, dtype=dtypes, device="cpu")

    def _rows(
        self, name: str, tensor: torch.Tensor, kv_cache: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return a view [num_tokens, num_heads, head_size] of `tensor`, after checking it."""
        heads = (self.num_heads, self.head_size)
        shape = heads if tensor.dim() == 3 else (self.num_heads * self.head_size,)
        check_tensor(name, tensor, shape=("num_tokens", *shape), dtype=kv_cache.dtype, device="cpu")
        if tensor.shape[0] < num_tokens:
            raise bad_argument(f"{name}.shape[0]", tensor.shape[0], f"at least {num_tokens} tokens")
        return tensor.view(tensor.shape[0], *heads)  # splitting a dimension fits any strides
