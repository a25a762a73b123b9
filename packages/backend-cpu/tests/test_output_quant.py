"""Quantised outputs: the four named keys, against quantising the plain output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.quant import (
    FP4_DTYPE,
    FP8_DTYPE,
    OUTPUT_QUANT_KEYS,
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
    quantize_output,
)

# Groups of decodes out of order, a chunk in tiles, and padding.
STEP = ([1, 20, 1, 1], [50, 30, 60, 3])
HIDDEN = 4 * 32


def _results(key: QuantKey, tokens: int) -> tuple[torch.Tensor, ...]:
    """Poisoned output, scale and block scale, as the caller of `forward` brings them."""
    one = torch.tensor([0.01])
    if key == kFp8StaticTensorSym:
        return torch.full((tokens, HIDDEN), 0xFF, dtype=torch.uint8).view(FP8_DTYPE), one, None
    if key == kNvfp4Dynamic:
        blocks = torch.full((tokens, HIDDEN // 16), 0xFF, dtype=torch.uint8).view(FP8_DTYPE)
        return torch.full((tokens, HIDDEN // 2), 0xFF, dtype=FP4_DTYPE), 900 * one, blocks
    groups = HIDDEN // key.scale.group_shape.col
    output = torch.full((tokens, HIDDEN), 0xFF, dtype=torch.uint8).view(FP8_DTYPE)
    return output, None, torch.full((tokens, groups), float("nan"))


NAMES = {
    "fp8 static": kFp8StaticTensorSym,
    "fp8 by 128": kFp8Dynamic128Sym,
    "fp8 by 64": kFp8Dynamic64Sym,
    "nvfp4": kNvfp4Dynamic,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("apart", [False, True], ids=["flat", "heads"])
def test_fused_quantisation_equals_quantising_afterwards(built, name, apart):
    key = NAMES[name]
    step = built(*STEP, pad_tokens=2)
    assert step.impl.fused_output_quant_supported(key)
    step.update()
    plain = step.forward()
    tokens = plain.shape[0]
    want, scale, want_blocks = _results(key, tokens)
    quantize_output(plain.flatten(1), key, want, scale, want_blocks)
    got, _, blocks = _results(key, tokens)
    output = got.view(tokens, 4, -1) if apart else got
    metadata = step.builder.build(0, step.batch)
    returned = step.impl.forward(
        step.layer, step.query, step.key, step.value, step.cache, metadata, output, scale, blocks
    )
    assert returned is output
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    if blocks is not None:
        assert torch.equal(blocks.view(torch.uint8), want_blocks.view(torch.uint8))


def test_all_four_keys_are_supported_and_no_other(built):
    impl = built([1], [1]).impl
    assert all(impl.fused_output_quant_supported(key) for key in OUTPUT_QUANT_KEYS)
    asymmetric = QuantKey(FP8_DTYPE, kFp8StaticTensorSym.scale, symmetric=False)
    assert not impl.fused_output_quant_supported(asymmetric)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"scale": None}, "output_scale"),
    ({"scale": torch.ones(2)}, "output_scale.shape"),
    ({"blocks": torch.ones(24, 1)}, "output_scale"),
    ({"output": torch.zeros(24, HIDDEN)}, "output.dtype"),
    ({"output": torch.zeros(24, 64, dtype=torch.uint8).view(FP8_DTYPE)}, "output.shape"),
    ({"output": torch.zeros(9, HIDDEN, dtype=torch.uint8).view(FP8_DTYPE)}, "output.shape"),
]


@pytest.mark.parametrize(("changes", "named"), BAD, ids=[named for _, named in BAD])
def test_results_that_do_not_go_together_are_refused(built, changes, named):
    step = built(*STEP, pad_tokens=1)
    step.update()
    output, scale, blocks = _results(kFp8StaticTensorSym, step.query.shape[0])
    given = {"output": output, "scale": scale, "blocks": blocks} | changes
    before = given["output"].clone()
    with pytest.raises(ValueError, match=f"^{named}"):
        step.impl.forward(
            step.layer, step.query, step.key, step.value, step.cache,
            step.builder.build(0, step.batch), *given.values(),
        )  # fmt: skip
    assert torch.equal(given["output"].view(torch.uint8), before.view(torch.uint8))
