"""What attends to what."""

from __future__ import annotations

from enum import Enum


class AttentionType(str, Enum):  # noqa: UP042 - StrEnum changes str(), which reasons print
    """Kind of attention of a layer; a string, so that it may pass through `torch.compile`."""

    DECODER = "decoder"
    """Self-attention of a decoder: queries, keys and values come from the layer before."""
    ENCODER = "encoder"
    """Self-attention of the encoder of an encoder-decoder model."""
    ENCODER_ONLY = "encoder_only"
    """Self-attention of a model that only encodes; it keeps no cache."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross-attention: queries of the decoder, keys and values of the encoder."""
