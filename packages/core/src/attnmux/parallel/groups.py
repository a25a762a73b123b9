"""Decode and prefill context-parallel groups over ``torch.distributed``.

``torch.distributed`` is imported when a group is made or used, not with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch

from attnmux.checks import bad_argument, check_positive
from attnmux.errors import ContractError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextParallelGroup:
    """The ranks that share one context, seen from one of them.

    Attributes:
        world_size: number of ranks in the group, at least 1.
        rank_in_group: this rank's place in the group, ``0 <= rank_in_group < world_size``.
        device_group: the process group that carries the collectives; None for a group of one
            rank, which needs none, and for a group that only states its size (see
            `use_context_parallel_groups`), whose collectives raise `ContractError`.
    """

    world_size: int = 1
    rank_in_group: int = 0
    device_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        """Refuse a rank outside the group."""
        check_positive("world_size", self.world_size)
        if not 0 <= self.rank_in_group < self.world_size:
            raise bad_argument(
                "rank_in_group", self.rank_in_group, f"0 to world_size - 1 = {self.world_size - 1}"
            )

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's ``tensor``, concatenated along ``dim`` in the order of the ranks.

        Args:
            tensor: any shape, the same on every rank, any strides.
            dim: the dimension that grows by a factor of ``world_size``.

        Returns:
            A new tensor, or ``tensor`` itself in a group of one rank.
        """
        dim = _dimension(tensor, dim)
        if self.world_size == 1:
            return tensor
        local = tensor.movedim(dim, 0).contiguous()
        gathered = local.new_empty((self.world_size * local.shape[0], *local.shape[1:]))
        all_gather = _collective("all_gather_single", "all_gather_into_tensor")
        all_gather(gathered, local, group=self._process_group())
        return gathered.movedim(0, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part, along ``dim``, of the sum of every rank's ``tensor``.

        Args:
            tensor: any shape, the same on every rank, any strides; size ``dim`` is a multiple of
                ``world_size``.
            dim: the dimension that shrinks by a factor of ``world_size``.

        Returns:
            A new tensor, or ``tensor`` itself in a group of one rank.

        Raises:
            ValueError: if ``tensor`` cannot be divided along ``dim``.
        """
        dim = _dimension(tensor, dim)
        part = self._part("tensor", tensor, dim)
        if self.world_size == 1:
            return tensor
        local = tensor.movedim(dim, 0).contiguous()
        reduced = local.new_empty((part, *local.shape[1:]))
        reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        reduce_scatter(reduced, local, group=self._process_group())
        return reduced.movedim(0, dim)

    def all_to_all(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Part ``r`` along ``dim`` goes to rank ``r``; what comes back is stacked by sender.

        Args:
            tensor: any shape, the same on every rank, any strides; size ``dim`` is a multiple of
                ``world_size``.
            dim: the dimension that is cut into one part for each rank.

        Returns:
            ``[world_size, *part]``: entry ``s`` is the part that rank ``s`` had for this rank.

        Raises:
            ValueError: if ``tensor`` cannot be divided along ``dim``.
        """
        dim = _dimension(tensor, dim)
        self._part("tensor", tensor, dim)
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        import torch.distributed as dist

        parts = torch.stack(tensor.tensor_split(self.world_size, dim))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._process_group())
        return received

    def _part(self, name: str, tensor: torch.Tensor, dim: int) -> int:
        size = tensor.shape[dim]
        if size % self.world_size:
            raise bad_argument(
                f"{name}.shape[{dim}]", size, f"a multiple of the group's {self.world_size} ranks"
            )
        return size // self.world_size

    def _process_group(self) -> ProcessGroup:
        if self.device_group is None:
            raise ContractError(
                f"device_group: got None for a group of {self.world_size} ranks; allowed: a "
                "process group, as made by init_context_parallel"
            )
        return self.device_group


def _collective(name: str, name_before_2_13: str) -> Callable[..., object]:
    """A collective of ``torch.distributed`` under the name that this version of torch gives it."""
    import torch.distributed as dist

    collective: Callable[..., object] | None = getattr(dist, name, None)
    return collective or cast("Callable[..., object]", getattr(dist, name_before_2_13))


def _dimension(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise bad_argument("dim", dim, f"a dimension of a tensor that has {tensor.dim()}")
    return dim % tensor.dim()


@dataclass(frozen=True)
class _Groups:
    dcp: ContextParallelGroup | None = None
    pcp: ContextParallelGroup | None = None
    owns_world: bool = False


_NO_GROUPS = _Groups()
# The groups of the process, and the ones that a `with` block of the running context put over them.
_process_groups: _Groups = _NO_GROUPS
_override: ContextVar[_Groups | None] = ContextVar("attnmux_context_parallel", default=None)


def get_dcp_group() -> ContextParallelGroup:
    """The decode context-parallel group of this rank.

    Raises:
        ContractError: (a ValueError and an AssertionError) if no group was initialised.
    """
    return _require("decode", (_override.get() or _process_groups).dcp)


def get_pcp_group() -> ContextParallelGroup:
    """The prefill context-parallel group of this rank.

    Raises:
        ContractError: (a ValueError and an AssertionError) if no group was initialised.
    """
    return _require("prefill", (_override.get() or _process_groups).pcp)


def context_parallel_place(kind: Literal["dcp", "pcp"]) -> tuple[int, int]:
    """This process's (world size, rank) in a group; (1, 0) where no group was initialised."""
    try:
        group = get_dcp_group() if kind == "dcp" else get_pcp_group()
    except AssertionError:
        return 1, 0
    return group.world_size, group.rank_in_group


def _require(kind: str, group: ContextParallelGroup | None) -> ContextParallelGroup:
    if group is None:
        raise ContractError(
            f"{kind} context-parallel group: got none; allowed: one made by init_context_parallel"
        )
    return group


def init_context_parallel(
    dcp_size: int,
    pcp_size: int = 1,
    backend: str = "gloo",
    *,
    tensor_parallel_size: int | None = None,
) -> None:
    """Make this process's DCP and PCP groups; every process of the world must call it alike.

    Ranks are counted with the tensor-parallel rank fastest, then the prefill context-parallel
    one. DCP reuses the tensor-parallel ranks: a DCP group is ``dcp_size`` neighbours of one
    tensor-parallel group; a PCP group is the ranks ``tensor_parallel_size`` apart.

    A process group of the world that is already there is used as it is. If there is none, one is
    made from the environment (``MASTER_ADDR``, ``MASTER_PORT``, ``RANK``, ``WORLD_SIZE``), unless
    both sizes are 1, which needs no other process.

    Args:
        dcp_size: ranks in a DCP group; divides ``tensor_parallel_size``.
        pcp_size: ranks in a PCP group.
        backend: ``torch.distributed`` backend of the groups, such as "gloo" or "nccl".
        tensor_parallel_size: ranks in a tensor-parallel group; None: the world's ranks divided by
            ``pcp_size``.

    Raises:
        ValueError: if the sizes do not divide the world.
        ContractError: if the groups are already there.
    """
    global _process_groups
    check_positive("dcp_size", dcp_size)
    check_positive("pcp_size", pcp_size)
    if _process_groups is not _NO_GROUPS:
        raise ContractError(
            "context-parallel groups: got a second initialisation; allowed: one until "
            "destroy_context_parallel"
        )
    import torch.distributed as dist

    owns_world = False
    if not dist.is_initialized():
        if dcp_size == pcp_size == 1 and tensor_parallel_size in (None, 1):
            _process_groups = _Groups(ContextParallelGroup(), ContextParallelGroup())
            return
        dist.init_process_group(backend)
        owns_world = True
    try:
        dcp_ranks, pcp_ranks = _rank_lists(
            dist.get_world_size(), dcp_size, pcp_size, tensor_parallel_size
        )
        _process_groups = _Groups(
            _make_group(dcp_ranks, backend), _make_group(pcp_ranks, backend), owns_world
        )
    except BaseException:
        if owns_world:
            dist.destroy_process_group()
        raise


def _rank_lists(
    world_size: int, dcp_size: int, pcp_size: int, tensor_parallel_size: int | None
) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of every DCP group and of every PCP group of a world."""
    if world_size % pcp_size:
        raise bad_argument("pcp_size", pcp_size, f"a divisor of the world's {world_size} ranks")
    tp_size = world_size // pcp_size if tensor_parallel_size is None else tensor_parallel_size
    check_positive("tensor_parallel_size", tp_size)
    if world_size % (tp_size * pcp_size):
        raise bad_argument(
            "tensor_parallel_size",
            tp_size,
            f"a divisor of the world's {world_size} ranks divided by pcp_size = {pcp_size}",
        )
    if tp_size % dcp_size:
        raise bad_argument("dcp_size", dcp_size, f"a divisor of tensor_parallel_size = {tp_size}")
    ranks = torch.arange(world_size, device="cpu").view(-1, pcp_size, tp_size)
    dcp_ranks: list[list[int]] = ranks.reshape(-1, dcp_size).tolist()
    pcp_ranks: list[list[int]] = ranks.transpose(1, 2).reshape(-1, pcp_size).tolist()
    return dcp_ranks, pcp_ranks


def _make_group(rank_lists: list[list[int]], backend: str) -> ContextParallelGroup:
    """This process's group. Every process makes every group, as the library demands."""
    import torch.distributed as dist

    mine: ContextParallelGroup | None = None
    for ranks in rank_lists:
        group = dist.new_group(ranks, backend=backend) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            mine = ContextParallelGroup(len(ranks), ranks.index(dist.get_rank()), group)
    assert mine is not None  # the lists cover the world
    return mine


def destroy_context_parallel() -> None:
    """Forget the groups and free their process groups; nothing happens if there are none.

    The process group of the world is destroyed only if `init_context_parallel` made it.
    """
    global _process_groups
    groups, _process_groups = _process_groups, _NO_GROUPS
    made = [g.device_group for g in (groups.dcp, groups.pcp) if g is not None and g.device_group]
    if not made and not groups.owns_world:
        return
    import torch.distributed as dist

    for group in made:
        dist.destroy_process_group(group)
    if groups.owns_world:
        dist.destroy_process_group()


@contextmanager
def use_context_parallel_groups(
    *, dcp: ContextParallelGroup | None = None, pcp: ContextParallelGroup | None = None
) -> Iterator[None]:
    """Inside the block `get_dcp_group` and `get_pcp_group` answer with these groups.

    Meant for tests and for engines that hold groups of their own: anything with ``world_size``
    and ``rank_in_group`` answers an implementation's questions, without a process group. None
    stands for a group that is not initialised. Blocks nest, and hold for the running context
    (thread or task) alone.
    """
    token = _override.set(_Groups(dcp, pcp))
    try:
        yield
    finally:
        _override.reset(token)
