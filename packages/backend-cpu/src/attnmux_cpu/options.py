"""What users may set for the CPU backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from attnmux.checks import bad_argument, check_positive

MIN_WORKSPACE_BYTES = 1 << 20


Options = TypeVar("Options")


def check_options(options: Options | None, wanted: type[Options]) -> Options:
    """Return the options, the defaults for None; a `ValueError` if they are another backend's."""
    if options is None:
        return wanted()
    if not isinstance(options, wanted):
        raise bad_argument("options", type(options).__name__, f"None | {wanted.__name__}")
    return options


@dataclass(frozen=True)
class CPUAttentionOptions:
    """Options of ``CPU_ATTN``.

    Attributes:
        workspace_bytes: Bound of the scratch memory of a call, whatever the lengths: tiles shrink
            to fit, down to one page of keys and one query token.
        max_grouped_queries: Requests with at most this many query tokens run together with others
            of the same number; longer ones run one by one, in tiles.
    """

    workspace_bytes: int = 64 << 20
    max_grouped_queries: int = 16

    def __post_init__(self) -> None:
        """Refuse sizes that no tile fits into."""
        check_positive("max_grouped_queries", self.max_grouped_queries)
        check_positive("workspace_bytes", self.workspace_bytes)
        if self.workspace_bytes < MIN_WORKSPACE_BYTES:
            raise bad_argument(
                "workspace_bytes", self.workspace_bytes, f"at least {MIN_WORKSPACE_BYTES}"
            )


@dataclass(frozen=True)
class CPUMLAOptions:
    """Options of ``CPU_MLA`` and ``CPU_MLA_SPARSE``.

    Attributes:
        context_tokens: Cached tokens of prefills that are uncompressed at a time, over all
            requests. Each takes ``num_heads * (qk_nope_head_dim + v_head_dim)`` values of the
            model's dtype.
        decode_tokens: Cached rows that decodes, dense or sparse, hold as float32 at a time.
    """

    context_tokens: int = 2048
    decode_tokens: int = 1024

    def __post_init__(self) -> None:
        """Refuse sizes that hold no token."""
        check_positive("context_tokens", self.context_tokens)
        check_positive("decode_tokens", self.decode_tokens)
