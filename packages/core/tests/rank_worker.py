"""One rank of a small world, run as a process of its own: writes what it found to a file.

Usage: ``python rank_worker.py RANK WORLD_SIZE FOLDER``, or with a port in place of the folder to
make the world from the environment. The parent compares the files; a failed check here is a
non-zero exit with its traceback.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from attnmux.parallel import (
    ContextParallelGroup,
    destroy_context_parallel,
    get_dcp_group,
    get_pcp_group,
    init_context_parallel,
    merge_across_ranks,
)

SCHEMES = ("all_gather_reduce_scatter", "all_to_all")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def partial_state(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's result for 6 tokens of 8 heads, with rows that are empty on some or all ranks."""
    generator = torch.Generator().manual_seed(100 + rank)
    out = torch.randn(6, 8, 16, generator=generator).to(dtype)
    lse = torch.randn(6, 8, generator=generator) * 5
    lse[0] = -torch.inf  # nobody has a key for token 0
    if rank > 0:
        lse[1] = -torch.inf  # only rank 0 has keys for token 1
    if rank % 2:
        lse[2, ::3] = torch.inf  # what some kernels say of a row without keys
    out[torch.isinf(lse)] = torch.nan
    return out, lse


def collectives(group: ContextParallelGroup) -> dict[str, torch.Tensor]:
    """Each collective on a tensor that is not contiguous."""
    base = torch.arange(24, dtype=torch.float32).view(4, 6) + 1000 * group.rank_in_group
    strided = base.t()  # [6, 4]
    return {
        "all_gather_last": group.all_gather(strided),
        "all_gather_first": group.all_gather(strided, dim=0),
        "reduce_scatter": group.reduce_scatter(strided, dim=-1),
        "all_to_all": group.all_to_all(strided, dim=1),
    }


def merges(group: ContextParallelGroup) -> dict[str, torch.Tensor]:
    """Both schemes, each dtype; in base 2 on odd ranks, which declare it."""
    found = {}
    for name, dtype in DTYPES.items():
        out, lse = partial_state(group.rank_in_group, dtype)
        found |= {f"{name}/out": out, f"{name}/lse": lse}
        for scheme in SCHEMES:
            natural = merge_across_ranks(out, lse, group, scheme=scheme)
            found[f"{scheme}/{name}/out"], found[f"{scheme}/{name}/lse"] = natural
            base_on_e = group.rank_in_group % 2 == 0
            own = lse if base_on_e else lse / torch.log(torch.tensor(2.0))
            mixed = merge_across_ranks(out, own, group, scheme=scheme, base_on_e=base_on_e)
            found[f"{scheme}/{name}/mixed/out"], found[f"{scheme}/{name}/mixed/lse"] = mixed
    return found


def groups_of_two_kinds() -> dict[str, torch.Tensor]:
    """DCP 2 x PCP 2 of a world of four: who sits with whom."""
    init_context_parallel(2, 2)
    rank = torch.tensor([dist.get_rank()])
    found = {
        "dcp": get_dcp_group().all_gather(rank),
        "pcp": get_pcp_group().all_gather(rank),
        "places": torch.tensor([get_dcp_group().rank_in_group, get_pcp_group().rank_in_group]),
    }
    destroy_context_parallel()
    assert dist.is_initialized(), "a world that was there before must stay"
    return found


def world_from_environment(rank: int, world_size: int, port: str) -> None:
    """The world is made from the environment, and destroyed with the groups."""
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    init_context_parallel(world_size)
    assert get_dcp_group().rank_in_group == rank
    destroy_context_parallel()
    assert not dist.is_initialized()


def main(rank: int, world_size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    init_context_parallel(world_size)
    group = get_dcp_group()
    found = {"place": torch.tensor([group.rank_in_group, group.world_size])}
    found |= collectives(group) | merges(group)
    destroy_context_parallel()
    if world_size == 4:
        found |= groups_of_two_kinds()
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    own_rank, size, folder_or_port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if folder_or_port.isdigit():
        world_from_environment(own_rank, size, folder_or_port)
    else:
        main(own_rank, size, Path(folder_or_port))
