"""Batches whose lengths sit where kernels go wrong: on the edges of blocks and tiles, and at 0.

Each phase has a fixed list of what its lengths stand for; the random part is the order, and one
length that nobody thought of.
"""

from __future__ import annotations

from random import Random

from attnmux.testing.scenario import Request

_LARGEST_EDGE = 40
"""Blocks longer than this are walked once, not on every edge: the float64 answer costs time."""


def draw_requests(phase: str, block_size: int, random: Random) -> tuple[Request, ...]:
    """Draw the requests of one step, in random order.

    Args:
        phase: "prefill" (no context), "extend" (several tokens after a context), "decode" (one
            token after a context) or "mixed" (all of them, with empty places).
        block_size: tokens in a block.
        random: the source of the draw.
    """
    draw = {"prefill": _prefill, "extend": _extend, "decode": _decode, "mixed": _mixed}[phase]
    requests = draw(block_size, random)
    random.shuffle(requests)
    return tuple(requests)


def _edges(block_size: int) -> list[int]:
    """Lengths just below, on and just above a block, or one above a block that is large."""
    if block_size > _LARGEST_EDGE:
        return [block_size + 1, 7]
    return [max(1, block_size - 1), block_size, block_size + 1]


def _prefill(block_size: int, random: Random) -> list[Request]:
    lengths = [1, *_edges(block_size), 2 * min(block_size, 16) + 3, random.randint(4, 40)]
    return [Request(length, length) for length in lengths] + [Request(0, 0)]


def _extend(block_size: int, random: Random) -> list[Request]:
    requests = [Request(random.randint(2, 5), edge + 5) for edge in _edges(block_size)]
    requests.append(Request(8, 9))  # a context of one token
    requests.append(Request(min(block_size, 16), 2 * min(block_size, 16)))
    requests.append(Request(random.randint(2, 9), random.randint(12, 50)))
    return requests


def _decode(block_size: int, random: Random) -> list[Request]:
    lengths = [1, *_edges(block_size), 9, 2 * min(block_size, 32), random.randint(20, 60)]
    # An empty place may have kept the length of the request that was there.
    return [Request(1, length) for length in lengths] + [Request(0, 0), Request(0, 5)]


def _mixed(block_size: int, random: Random) -> list[Request]:
    edges = _edges(block_size)
    decodes = [Request(1, random.choice(edges)), Request(1, random.randint(10, 50))]
    extends = [Request(3, edges[-1] + 4), Request(random.randint(4, 12), random.randint(20, 45))]
    prefills = [Request(n, n) for n in (random.randint(6, 20), random.choice(edges))]
    return decodes + extends + prefills + [Request(0, 0)]
