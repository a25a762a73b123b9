"""Order of a cache's dimensions in memory."""

from __future__ import annotations

from enum import Enum
from typing import Final

# Places of the five logical dimensions; a row's content is always last in memory.
_LAYER, _BLOCK, _HEAD, _TOKEN, _CONTENT = range(5)


class KVCacheLayout(Enum):
    """Physical order of a cache whose logical shape is ``[L, B, H, N, C]``.

    Letters stand for layers, blocks, KV heads, tokens of a block (N) and the content of a row (C).
    A member's value lists the logical dimensions from the outermost in memory to the innermost.
    """

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)

    @property
    def stride_order(self) -> tuple[int, ...]:
        """Logical dimensions, outermost in memory first."""
        return self.value

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """The same for one layer's ``[B, H, N, C]``."""
        return tuple(dim - 1 for dim in self.value if dim != _LAYER)

    @property
    def is_layer_compact(self) -> bool:
        """Whether each layer is one run of memory."""
        return self.value[0] == _LAYER

    @property
    def is_block_compact(self) -> bool:
        """Whether each layer's page of a block is one run of memory."""
        return set(self.value[:2]) == {_LAYER, _BLOCK}

    @property
    def is_block_contiguous(self) -> bool:
        """Whether a page is contiguous in the order of its logical dimensions."""
        return self.value[2:] == (_HEAD, _TOKEN, _CONTENT)

    @property
    def is_block_outermost(self) -> bool:
        """Whether all layers' pages of a block lie together."""
        return self.value[0] == _BLOCK


LAYOUT_PREFERENCE: Final = (
    KVCacheLayout.LBNHC,
    KVCacheLayout.LBHNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BLHNC,
    KVCacheLayout.BHLNC,
    KVCacheLayout.LHBNC,
)
"""Order of choice where no backend has a preference."""
