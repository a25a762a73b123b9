"""One step of the model over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from attnmux.batch import classify_requests, make_metadata, reorder_batch
from attnmux_transformers.layers import LayerStack
from attnmux_transformers.model_call import call_model, keeps_logits
from attnmux_transformers.scheduler import Chunk


class ModelRunner:
    """Calls the model on one row of concatenated chunks, prefills and decodes together."""

    def __init__(self, model: PreTrainedModel, stack: LayerStack, block_size: int) -> None:
        """Run `model` with the attention layers of `stack`.

        Args:
            model: Its attention implementation has to be attnmux whenever `run` is called.
            stack: Its attention layers.
            block_size: Tokens in a block of the cache.
        """
        self.model = model
        self.stack = stack
        self.block_size = block_size
        self._names = {module: name for name, module in model.named_modules()}
        self._keeps_logits = keeps_logits(model)

    def run(self, chunks: Sequence[Chunk]) -> list[torch.Tensor | None]:
        """Compute the chunks' tokens and put their keys and values into the cache.

        Args:
            chunks: At least one; their requests hold the blocks for them.

        Returns:
            For each chunk, the logits ``[vocabulary]`` of its last token, or None where the chunk
            leaves tokens of its request pending.
        """
        order = self._order(chunks)
        ordered = [chunks[place] for place in order]
        device = self.model.device
        lengths = [chunk.num_tokens for chunk in ordered]
        tokens = [token for chunk in ordered for token in chunk.request.pending(chunk.num_tokens)]
        positions = [np.arange(chunk.request.num_computed, chunk.seq_len) for chunk in ordered]
        batch = make_metadata(
            lengths,
            [chunk.seq_len for chunk in ordered],
            [chunk.request.blocks for chunk in ordered],
            self.block_size,
            device=device,
            is_prefilling=torch.tensor([_is_prefilling(chunk) for chunk in ordered]),
        )
        ends = np.cumsum(lengths) - 1
        wanted = [int(end) for end, chunk in zip(ends, ordered, strict=True) if chunk.completes]
        rows = torch.tensor(wanted or [len(tokens) - 1], device=device)
        logits = call_model(
            self.model,
            self.stack.begin(batch, self._names),
            torch.tensor(tokens, device=device),
            torch.from_numpy(np.concatenate(positions)).to(device),
            rows if self._keeps_logits else None,
        ).logits[0]
        chosen = iter(logits if self._keeps_logits else logits[rows])
        results: list[torch.Tensor | None] = [None] * len(chunks)
        for place, chunk in zip(order, ordered, strict=True):
            if chunk.completes:
                results[place] = next(chosen)
        return results

    def _order(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the places of `chunks` in the order that builders want: decodes first."""
        kinds = classify_requests(
            [chunk.num_tokens for chunk in chunks],
            [chunk.request.num_computed for chunk in chunks],
            [_is_prefilling(chunk) for chunk in chunks],
            self.stack.decode_threshold,
        )
        return [int(place) for place in reorder_batch(kinds)]


def _is_prefilling(chunk: Chunk) -> bool:
    return chunk.request.num_computed < len(chunk.request.prompt)
