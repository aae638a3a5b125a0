"""The processes that train one draft together, and what they say to each other.

Every process computes other rows of a step; DDP or FSDP2 (torch's own) brings the gradients
together. Alone, all of this is nothing. Processes are started by torchrun (`training.launch`); a
process that waits in vain for the others gives up after `PATIENCE`, which torchrun turns into the
end of all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from speculators_core.errors import SpeclabError

PATIENCE = timedelta(seconds=75)  # torchrun takes up to 30 s more for one that hangs
_LOOK_S = 0.2
_FAILED = "failed"

Made = TypeVar("Made")
Row = TypeVar("Row")


@dataclass(frozen=True)
class World:
    """This process among `size`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    store: Store | None = None

    @property
    def first(self) -> bool:
        """The one that writes and tells."""
        return self.rank == 0

    def mine(self, rows: Sequence[Row], slots: int) -> list[Row | None]:
        """This process's `slots` of up to `slots` x `size` rows; None where there is none left."""
        own: list[Row | None] = list(rows[self.rank :: self.size])
        return own + [None] * (slots - len(own))

    def sum(self, values: Tensor) -> Tensor:
        """The sum of everybody's, to everybody."""
        if self.size > 1:
            values = values.to(_wire())
            dist.all_reduce(values)
        return values

    def values(self, value: int) -> list[int]:
        """Everybody's value, to everybody, by rank."""
        told = torch.zeros(self.size, dtype=torch.int64)
        told[self.rank] = value
        return [int(each) for each in self.sum(told)]

    def meet(self) -> None:
        """Go on when everybody is here."""
        if self.size > 1:
            dist.barrier()

    def heard(self, value: int) -> int:
        """The first one's value, to everybody."""
        if self.size == 1:
            return value
        told = torch.tensor([value], device=_wire())
        dist.broadcast(told, 0)
        return int(told)

    def in_turn(self, work: Callable[[], Made]) -> Made:
        """The first process works, then the first of every other node, then the rest: what one
        has left on a disk, the next finds. Waiting is not limited, for the work may take hours.
        """
        if self.store is not None and not self.first:
            self._await("first" if self.local_rank == 0 else f"node {self.node}")
        made = work()
        if self.store is not None:
            if self.first:
                self.store.set("first", "done")
            if self.local_rank == 0:
                self.store.set(f"node {self.node}", "done")
        return made

    def after_first(self, name: str, work: Callable[[], object]) -> None:
        """The first process works while the others wait, however long it takes."""
        if self.first:
            work()
            if self.store is not None:
                self.store.set(name, "done")
        else:
            self._await(name)

    def fail(self) -> None:
        """Tell those who wait for this process that they wait in vain."""
        if self.store is not None:
            self.store.set(_FAILED, str(self.rank))

    def _await(self, name: str) -> None:
        assert self.store is not None
        while not self.store.check([name]):
            if self.store.check([_FAILED]):
                raise SpeclabError(f"process {self.store.get(_FAILED).decode()} failed")
            time.sleep(_LOOK_S)


def join() -> World:
    """This process's place among those that torchrun started, by the environment it gave."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local)
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not agents,
        timeout=PATIENCE,
    )
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("group", meeting),
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    store = PrefixStore("speclab", meeting)
    return World(rank, size, local, int(os.environ["GROUP_RANK"]), store)


def leave() -> None:
    """After the last word to the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shared(module: nn.Module, world: World, sharding: str) -> nn.Module:
    """The module as all processes train it: replicated (ddp) or in parts (fsdp)."""
    if world.size == 1:
        return module
    if sharding == "fsdp":
        mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world.size,))
        fully_shard(module, mesh=mesh)  # in place
        return module
    return DistributedDataParallel(module, forward_sync_buffers=False)


@contextmanager
def gathering(module: nn.Module, now: bool) -> Iterator[None]:
    """A backward pass within brings gradients together only when it is the step's last."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        yield
    elif isinstance(module, DistributedDataParallel) and not now:
        with module.no_sync():
            yield
    else:
        yield


@contextmanager
def assembled(module: nn.Module) -> Iterator[None]:
    """Parameters are whole within, for passes that are not the module's own."""
    if isinstance(module, FSDPModule):
        module.unshard()
        try:
            yield
        finally:
            module.reshard()
    else:
        yield


def in_parts(module: nn.Module) -> bool:
    """Whether this process holds only a part of its parameters."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded or placed as another is."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)


def _wire() -> torch.device:
    """Where tensors must lie to be sent."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
