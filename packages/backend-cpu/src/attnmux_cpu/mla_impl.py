"""Once a layer: check what came, then run the latent kernels."""

from __future__ import annotations

from typing import ClassVar

import torch

from attnmux.backend import AttentionLayer
from attnmux.checks import bad_argument, check_index_dtype, check_tensor
from attnmux.quant import output_quant_key, quantize_output
from attnmux_cpu.kernels.mla_decode import launch_decode
from attnmux_cpu.kernels.mla_prefill import PrefillInputs, UpProjection, launch_prefill
from attnmux_cpu.kernels.mla_sparse import INDICES_NAME, check_indices, launch_sparse
from attnmux_cpu.mla_base import LatentImpl, check_metadata, check_num_rows
from attnmux_cpu.mla_builder import CPUMLADenseMetadata, CPUMLASparseMetadata


class CPUMLAImpl(LatentImpl[CPUMLADenseMetadata]):
    """Dense latent attention: `forward_mha` for prefills, `forward_mqa` for decodes."""

    def _check_indexer(self) -> None:
        if self.indexer is not None:
            raise bad_argument("indexer", type(self.indexer).__name__, "None | CPU_MLA_SPARSE")

    @torch.no_grad()
    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CPUMLADenseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the cache; the decodes' own rows must have been written.

        Args:
            q: ``[num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim]`` or its two parts, with
                at least `num_decode_tokens` rows; heads may be padded to `q_pad_num_heads`.
            kv_c_and_k_pe_cache: ``[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]``.
            attn_metadata: What the builder made.
            layer: Brings `_k_scale`, which a quantised cache needs.

        Returns:
            ``[num_tokens, num_heads, kv_lora_rank]`` in the query's dtype, and the natural
            log-sum-exp ``[num_tokens, num_heads]`` float32. Rows that see nothing, those of no
            request and heads that only pad the query are 0 and -inf.

        Raises:
            ValueError: An argument does not fit.
        """
        check_metadata(attn_metadata, CPUMLADenseMetadata)
        parts = self.check_query(q, attn_metadata)
        cache = self.open_cache(
            kv_c_and_k_pe_cache, attn_metadata, parts[0].dtype, self.scale_of(layer)
        )
        output, lse = launch_decode(
            parts,
            cache,
            attn_metadata.decode,
            scale=self.scale,
            rank=self.kv_lora_rank,
            workspace_tokens=self.options.decode_tokens,
        )
        return self.padded(output, lse, q)

    @torch.no_grad()
    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CPUMLADenseMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend with uncompressed keys and values: own tokens as given, their context cached.

        Args:
            q: ``[num_tokens, num_heads, qk_head_dim]``, at least `num_prefill_tokens` rows; those
                past them are left alone here and in the arguments below.
            kv_c_normed: ``[num_tokens, kv_lora_rank]``.
            k_pe: ``[num_tokens, 1, qk_rope_head_dim]``.
            kv_c_and_k_pe_cache: ``[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]``.
            attn_metadata: What the builder made.
            k_scale: One float32 element, which a quantised cache needs.
            output: Written: ``[num_tokens, num_heads * v_head_dim]`` or with heads apart; 0 for
                tokens of no request.
            output_scale: One float32 element where `output` is fp8: what is stored is value /
                output_scale.

        Raises:
            ValueError: An argument does not fit; nothing was written.
        """
        check_metadata(attn_metadata, CPUMLADenseMetadata)
        num_tokens = attn_metadata.num_prefill_tokens
        rotary = self.check_latents(kv_c_normed, k_pe)
        shape = ("num_tokens", self.num_heads, self.qk_head_dim)
        check_tensor("q", q, shape=shape, dtype=kv_c_normed.dtype, device="cpu")
        check_tensor("output", output, device="cpu")
        heads = (self.num_heads, self.v_head_dim)
        apart = output.dim() == 3
        flat = (self.num_heads * self.v_head_dim,)
        check_tensor("output", output, shape=("num_tokens", *(heads if apart else flat)))
        for name, tensor in (("q", q), ("kv_c_normed", kv_c_normed), ("output", output)):
            check_num_rows(name, tensor, num_tokens)
        key = output_quant_key(output, output_scale, None)
        if key is None:
            check_tensor("output", output, dtype=q.dtype)
        cache = self.open_cache(kv_c_and_k_pe_cache, attn_metadata, q.dtype, k_scale)
        values, _ = launch_prefill(
            PrefillInputs(
                q[:num_tokens], kv_c_normed[:num_tokens], rotary[:num_tokens], cache, self.scale
            ),
            attn_metadata.prefill,
            UpProjection(self.kv_b_proj, self.num_heads, self.qk_nope_head_dim, self.v_head_dim),
        )
        by_token = values.transpose(0, 1)
        result = by_token if apart else by_token.reshape(num_tokens, -1)
        if key is None:
            output[:num_tokens] = result.to(output.dtype)
        else:
            quantize_output(result, key, output[:num_tokens], output_scale)


class CPUMLASparseImpl(LatentImpl[CPUMLASparseMetadata]):
    """Latent attention to listed positions; every token goes through `forward_mqa`."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: ClassVar[bool] = False

    def _check_indexer(self) -> None:
        if not hasattr(self.indexer, "topk_indices_buffer"):
            got = "None" if self.indexer is None else type(self.indexer).__name__
            raise bad_argument("indexer", got, "an object with a topk_indices_buffer")

    @torch.no_grad()
    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CPUMLASparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the positions that ``indexer.topk_indices_buffer`` lists for each token.

        The buffer is int32 or int64 ``[at least num_tokens, k]``: positions within the request in
        any order, -1 for none. Arguments and results are otherwise as in `CPUMLAImpl.forward_mqa`.

        Raises:
            ValueError: An argument does not fit, a position is listed twice for a token, or it is
                one that the token does not see.
        """
        check_metadata(attn_metadata, CPUMLASparseMetadata)
        parts = self.check_query(q, attn_metadata)
        cache = self.open_cache(
            kv_c_and_k_pe_cache, attn_metadata, parts[0].dtype, self.scale_of(layer)
        )
        output, lse = launch_sparse(
            parts,
            cache,
            attn_metadata.token_requests,
            self._read_indices(attn_metadata),
            scale=self.scale,
            rank=self.kv_lora_rank,
            workspace_tokens=self.options.decode_tokens,
        )
        return self.padded(output, lse, q)

    def _read_indices(self, metadata: CPUMLASparseMetadata) -> torch.Tensor:
        buffer = getattr(self.indexer, "topk_indices_buffer", None)
        check_tensor(INDICES_NAME, buffer, shape=("num_tokens", "k"), device="cpu")
        assert isinstance(buffer, torch.Tensor)
        check_index_dtype(INDICES_NAME, buffer)
        num_listed = metadata.token_requests.numel()
        check_num_rows(INDICES_NAME, buffer, num_listed)
        indices = buffer[:num_listed].long()
        check_indices(indices, metadata.num_visible)
        return indices
