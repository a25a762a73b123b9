"""One attention problem on plain tensors: everything that decides the answer, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attnmux.checks import bad_argument, check_in, check_sliding_window
from attnmux.testing.paged_read import PER_TOKEN_HEAD_CACHE_DTYPES

ATTENTION_TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")
CACHED_TYPES = ("decoder", "encoder_decoder")
Ranges = Mapping[int, Sequence[tuple[int, int]]]


def split_heads(rows: torch.Tensor, size: int) -> torch.Tensor:
    """View ``[n, heads * size]`` as ``[n, heads, size]``; a tensor with heads stays as it is."""
    if rows.dim() == 3:
        return rows
    return rows.view(rows.shape[0], rows.shape[1] // size, size)


@dataclass(frozen=True)
class AttentionProblem:
    """The arguments of `attnmux.testing.reference.reference_attention`.

    Frozen, so that a variant ("the same without the sink") is a `dataclasses.replace`.

    Attributes:
        query: ``[num_tokens, num_heads, head_size]``, or flattened when `head_size` is given. Rows
            that belong to no request (past ``query_start_loc[-1]``) give 0 with lse -inf.
        key, value: ``[num_kv_tokens, num_kv_heads, head_size]`` and ``[..., head_size_v]``. Read
            for "encoder" and "encoder_only" (each request's own rows) and for "encoder_decoder"
            without a cache (each request's encoder tokens, concatenated). With a cache they are
            ignored: what counts is what the cache holds.
        query_start_loc: ``[num_reqs + 1]`` first query row of each request.
        seq_lens: ``[num_reqs]`` keys of each request, its newest queries included.
        scale: factor of the scores; None is ``head_size ** -0.5``.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, content]``, any strides, keys first.
        block_table: ``[num_reqs, max_blocks]``; entries past a request's length are not looked at.
        kv_cache_dtype, k_scale, v_scale: how the cache is stored; a scale is one number or one per
            KV head. The values read back are the truth, so quantisation is not an error here.
        head_size, head_size_v: taken from `query`, `value` or the cache's content when None.
        attn_type: "decoder", "encoder", "encoder_only" or "encoder_decoder".
        causal: one answer, or a bool tensor ``[num_reqs]``; the other types are never causal.
        sliding_window: keys seen, the query's own position included; both sides for encoder types.
        logits_soft_cap: None or 0 is none.
        alibi_slopes: ``[num_heads]``; `use_alibi_sqrt` picks the square-root form.
        sinks: ``[num_heads]`` one more logit for each head, without a value.
        mm_req_doc_ranges: request → inclusive ranges of positions that see each other both ways.
        rswa_window, rswa_prefix_lens: keys below the prefix length ``[num_reqs]`` stay visible,
            later ones are windowed. Without prefix lengths there is no such window.
        encoder_seq_lens: ``[num_reqs]`` keys of each request for "encoder_decoder"; None is
            `seq_lens`.
        query_offsets: ``[num_reqs]`` position of the first query row; None is ``seq_len -
            query_len``. Only for asking what a wrong alignment would give.
    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    scale: float | None = None
    kv_cache: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    kv_cache_dtype: str = "auto"
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    head_size: int | None = None
    head_size_v: int | None = None
    attn_type: str = "decoder"
    causal: bool | torch.Tensor = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Sequence[float] | torch.Tensor | None = None
    use_alibi_sqrt: bool = False
    sinks: torch.Tensor | None = None
    mm_req_doc_ranges: Ranges | None = None
    rswa_window: int | None = None
    rswa_prefix_lens: torch.Tensor | None = None
    encoder_seq_lens: torch.Tensor | None = None
    query_offsets: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        check_in("attn_type", self.type_name, ATTENTION_TYPES)
        check_sliding_window(self.sliding_window)
        if self.type_name == "encoder_decoder" and (self.sliding_window or self.has_alibi):
            raise bad_argument("attn_type", "encoder_decoder with a window or ALiBi", "neither")
        if self.query.dim() != 3 and self.head_size is None:
            raise bad_argument("head_size", "None with a flattened query", "a positive integer")
        if self.uses_cache and self.block_table is None:
            raise bad_argument("block_table", None, "a table when there is a cache")
        if not self.uses_cache and (self.key is None or self.value is None):
            raise bad_argument("key, value", None, "tensors when there is no cache")

    @property
    def type_name(self) -> str:
        """The attention type as a plain string."""
        return str(getattr(self.attn_type, "value", self.attn_type))

    @property
    def has_alibi(self) -> bool:
        """Whether slopes were given."""
        return self.alibi_slopes is not None

    @property
    def uses_cache(self) -> bool:
        """Whether keys come from the paged cache."""
        has_cache = self.kv_cache is not None and self.kv_cache.numel() > 0
        return has_cache and self.type_name in CACHED_TYPES

    @property
    def size(self) -> int:
        """Head size of query and key."""
        return self.head_size or self.query.shape[-1]

    @property
    def size_v(self) -> int:
        """Head size of value and output."""
        if self.head_size_v:
            return self.head_size_v
        if self.value is not None and self.value.dim() == 3:
            return self.value.shape[-1]
        if self.kv_cache is None or self.kv_cache_dtype in PER_TOKEN_HEAD_CACHE_DTYPES:
            return self.size  # such a row is padded and carries its scales
        return self.kv_cache.shape[-1] - self.size

    @property
    def scale_factor(self) -> float:
        """What multiplies the scores."""
        return self.size**-0.5 if self.scale is None else float(self.scale)

    @property
    def queries(self) -> torch.Tensor:
        """``[num_tokens, num_heads, head_size]`` in the dtype they came in."""
        return split_heads(self.query, self.size)

    def num_keys(self, request: int, query_len: int) -> int:
        """How many keys `request` has."""
        if self.type_name in ("encoder", "encoder_only"):
            return query_len
        if self.type_name == "encoder_decoder" and self.encoder_seq_lens is not None:
            return int(self.encoder_seq_lens[request])
        return int(self.seq_lens[request])

    def first_position(self, request: int, query_len: int) -> int:
        """Position of the first query row of `request`."""
        if self.query_offsets is not None:
            return int(self.query_offsets[request])
        if self.type_name in ("encoder", "encoder_only"):
            return 0
        return int(self.seq_lens[request]) - query_len

    def is_causal(self, request: int) -> bool:
        """Whether `request` looks back only."""
        if self.type_name != "decoder":
            return False
        if isinstance(self.causal, torch.Tensor):
            return bool(self.causal[request])
        return bool(self.causal)
