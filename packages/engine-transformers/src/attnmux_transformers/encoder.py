"""Encoder models: hidden states of ragged texts, without a cache and without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from attnmux.backend import AttentionType
from attnmux.batch import make_metadata
from attnmux.checks import bad_argument
from attnmux_transformers.attention import AttentionSwitch
from attnmux_transformers.layer_plans import describe_plans, plan_layers
from attnmux_transformers.layers import LayerStack
from attnmux_transformers.model_call import call_model
from attnmux_transformers.model_features import probe_model
from attnmux_transformers.model_limits import vocabulary_size


class Encoder:
    """Runs a bidirectional model over sequences of different lengths in one row."""

    def __init__(self, model: PreTrainedModel, *, backend: str | None = None) -> None:
        """Look at the model's layers and choose their backends.

        Args:
            model: An encoder of transformers that takes ``position_ids``, in evaluation mode.
            backend: Name of the attention backend; None lets selection decide.

        Raises:
            UnsupportedModelError: The model is not an encoder that can go through the contract.
        """
        # A module that is called for several layers has one set of features.
        features = {each.name: each for each in probe_model(model, AttentionType.ENCODER_ONLY)}
        self.model = model
        self.max_length = int(model.config.max_position_embeddings)
        self.plans = plan_layers(
            list(features.values()), block_size=1, device=model.device, backend=backend
        )
        self._names = {module: name for name, module in model.named_modules()}
        self._switch = AttentionSwitch(model)
        self._stack = LayerStack(
            self.plans,
            num_blocks=1,
            device=model.device,
            max_model_len=self.max_length,
            max_num_seqs=1,
            max_num_batched_tokens=self.max_length,
        )

    def report(self) -> str:
        """Return selection's report for each kind of layer, as text."""
        return describe_plans(self.plans)

    def hidden_states(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the last hidden states of each sequence, ``[num_tokens, hidden_size]``.

        Args:
            sequences: Tokens of each text, special tokens included.

        Raises:
            ValueError: There is no sequence, one is empty or longer than the model's positions, or
                a token is not in the vocabulary.
        """
        lengths = [len(sequence) for sequence in sequences]
        if not lengths or not all(1 <= length <= self.max_length for length in lengths):
            allowed = f"one or more sequences of 1 to {self.max_length} tokens"
            raise bad_argument("sequences", f"lengths {lengths}", allowed)
        tokens = [token for sequence in sequences for token in sequence]
        vocab_size = vocabulary_size(self.model)
        if not all(0 <= token < vocab_size for token in tokens):
            raise bad_argument(
                "sequences", f"tokens up to {max(tokens)}", f"tokens from 0 to {vocab_size - 1}"
            )
        device = self.model.device
        batch = make_metadata(lengths, lengths, None, 1, device=device, causal=False)
        step = self._stack.begin(batch, self._names)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        with self._switch.on():
            output = call_model(self.model, step, torch.tensor(tokens, device=device), positions)
        return list(output.last_hidden_state[0].split(lengths))
