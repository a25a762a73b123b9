"""Online softmax: the state of a row of attention while its keys arrive tile by tile.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); the merge of two states
is the same rule applied to finished results. All in float32 with the natural logarithm. A row that
has seen no key has maximum -inf and sum 0; it ends as output 0 and log-sum-exp -inf, never as NaN.
"""

from __future__ import annotations

import torch

from attnmux_cpu.kernels.workspace import Workspace


class SoftmaxState:
    """Running maximum and sum ``[n, rows, 1]`` and accumulator ``[n, rows, value_size]``, float32.

    `n` counts independent problems, such as requests times KV heads.
    """

    def __init__(
        self,
        running_max: torch.Tensor,
        running_sum: torch.Tensor,
        acc: torch.Tensor,
        is_empty: bool = False,
    ) -> None:
        """Wrap the three tensors; `is_empty` says that nothing was written to them yet."""
        self.running_max = running_max
        self.running_sum = running_sum
        self.acc = acc
        self._is_empty = is_empty

    @classmethod
    def empty(cls, workspace: Workspace, n: int, rows: int, value_size: int) -> SoftmaxState:
        """A state that has seen no key, in buffers of `workspace`."""
        return cls(
            workspace.take("running_max", (n, rows, 1)),
            workspace.take("running_sum", (n, rows, 1)),
            workspace.take("acc", (n, rows, value_size)),
            is_empty=True,
        )

    def first(self, n: int) -> SoftmaxState:
        """The state of the first `n` problems, sharing memory."""
        if n == self.acc.shape[0]:
            return self
        self._clear()
        return SoftmaxState(self.running_max[:n], self.running_sum[:n], self.acc[:n])

    def _clear(self) -> None:
        if self._is_empty:
            self.running_max.fill_(float("-inf"))
            self.running_sum.zero_()
            self.acc.zero_()
            self._is_empty = False

    def step(self, scores: torch.Tensor, value: torch.Tensor, is_masked: bool = True) -> None:
        """Take one tile of keys.

        Args:
            scores: ``[n, rows, tile]``, -inf where a row does not see the key. Overwritten.
            value: ``[n, tile, value_size]``; finite even where no row sees the key.
            is_masked: Whether a row of `scores` may be -inf throughout.
        """
        if self._is_empty:
            self._start(scores, value, is_masked)
            return
        new_max = torch.maximum(scores.amax(dim=-1, keepdim=True), self.running_max)
        origin = _finite(new_max) if is_masked else new_max
        weights = scores.sub_(origin).exp_()
        decay = self.running_max.sub_(origin).exp_()
        self.running_sum.mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
        self.acc.mul_(decay).baddbmm_(weights, value)
        self.running_max.copy_(new_max)

    def _start(self, scores: torch.Tensor, value: torch.Tensor, is_masked: bool) -> None:
        # The same with nothing to decay: a short request is one tile, and this is all it does.
        torch.amax(scores, dim=-1, keepdim=True, out=self.running_max)
        origin = _finite(self.running_max) if is_masked else self.running_max
        weights = scores.sub_(origin).exp_()
        torch.sum(weights, dim=-1, keepdim=True, out=self.running_sum)
        torch.bmm(weights, value, out=self.acc)
        self._is_empty = False

    def finish(self, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide, counting the sink once, and return output and log-sum-exp; the state is spent.

        Args:
            sinks: Logits that join the denominator only; broadcastable to ``[n, rows, 1]``.

        Returns:
            Output ``[n, rows, value_size]`` in the accumulator's memory, log-sum-exp ``[n, rows]``.
        """
        top, total = self._with_sinks(sinks)
        return self._divided(total), (top + total.log()).squeeze(-1)

    def finish_output(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As `finish`, where the log-sum-exp is not asked for."""
        return self._divided(self._with_sinks(sinks)[1])

    def _with_sinks(self, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self._clear()
        if sinks is None:
            return self.running_max, self.running_sum
        origin = _finite(torch.maximum(self.running_max, sinks))
        decay = (self.running_max - origin).exp_()
        self.acc.mul_(decay)
        return origin, self.running_sum * decay + (sinks - origin).exp()

    def _divided(self, total: torch.Tensor) -> torch.Tensor:
        return self.acc.div_(total.masked_fill(total == 0.0, 1.0))


def merge_states(
    output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two finished results over disjoint keys into the result over all of them.

    Args:
        output_a: ``[..., value_size]``, with natural log-sum-exp `lse_a` of shape ``[...]``.
        lse_a: -inf where `output_a` has seen no key; its output then does not count.
        output_b: As `output_a`.
        lse_b: As `lse_a`.

    Returns:
        Output and log-sum-exp, float32; two empty sides give 0 and -inf.
    """
    origin = _finite(torch.maximum(lse_a, lse_b).float())
    weight_a, weight_b = (lse_a - origin).exp(), (lse_b - origin).exp()
    total = weight_a + weight_b
    share = total.masked_fill(total == 0.0, 1.0)
    # An empty side may hold anything: 0 * NaN would be NaN.
    part_a = _weighed(output_a, weight_a / share)
    part_b = _weighed(output_b, weight_b / share)
    return part_a + part_b, origin + total.log()


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    # -inf - (-inf) is NaN: a row without a key is measured from 0 instead.
    return maximum.masked_fill(maximum == float("-inf"), 0.0)


def _weighed(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight = weight.unsqueeze(-1)
    return (output.float() * weight).masked_fill_(weight == 0.0, 0.0)
