"""Cells joined by prefix communicators (paper section 4.4, dynamic membership).

For n ordered members there are n-1 prebuilt groups, one for each prefix of 2..n. They are raw gloo groups
over a store of the core, outside torch's default world, so a dead cell breaks the groups it is in and nothing
else. A new generation of groups is built under a new store prefix when members change. Invariants:
- every collective has a deadline, and a failed one leaves the caller's own tensors unchanged;
- `reduce` sums; nothing is averaged.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    ReduceOptions,
    Store,
    TCPStore,
)

from gyre_trainer.errors import CollectiveError

CHUNK = 16 * 2**20
"""Elements of one collective: bounds the scratch memory that keeps the gradient sum intact."""


def host_store(host: str, timeout_s: float) -> TCPStore:
    """The core's store, reachable at `host` alone; its `port` is what the others connect to."""
    # Left to itself the store listens on every interface. It takes this socket over, and closes it.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Membership:
    """One member's prefix groups of one generation. `members` are cell indices in order, the core first."""

    def __init__(
        self,
        store: Store,
        generation: int,
        members: Sequence[int],
        cell: int,
        host: str,
        timeout_s: float,
        progress: Callable[[], None] = lambda: None,
    ):
        """Build the groups; all members do so at the same time. Raises CollectiveError past the deadline.

        `timeout_s` bounds each single collective; `progress` is called after each, because an operation here
        has as many as its tensors have chunks.
        """
        self.members = tuple(members)
        self.generation = generation
        self._timeout = timedelta(seconds=timeout_s)
        self._progress = progress
        self._position = self.members.index(cell)
        self._groups: dict[int, ProcessGroupGloo] = {}
        for count in range(max(2, self._position + 1), len(self.members) + 1):
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = self._timeout
            prefix = PrefixStore(f"generation{generation}/prefix{count}", store)
            self._groups[count] = self._run(
                f"building the group of cells {self.members[:count]}",
                lambda prefix=prefix, count=count, options=options: ProcessGroupGloo(
                    prefix, self._position, count, options
                ),
            )

    def reduce(self, tensors: Sequence[torch.Tensor], count: int) -> list[torch.Tensor] | None:
        """Sum flat tensors over the first `count` members. The core gets new tensors, others None."""
        options = ReduceOptions()
        options.reduceOp, options.rootRank, options.timeout = ReduceOp.SUM, 0, self._timeout
        what = f"summing gradients over cells {self.members[:count]}"
        results = []
        for tensor in tensors:
            result = torch.empty_like(tensor, device="cpu") if self._position == 0 else None
            for start in range(0, tensor.numel(), CHUNK):
                scratch = tensor[start : start + CHUNK].cpu().clone()
                self._run(what, lambda scratch=scratch: self._groups[count].reduce([scratch], options).wait())
                if result is not None:
                    result[start : start + CHUNK] = scratch
            results.append(result)
        return results if self._position == 0 else None

    def broadcast(self, tensors: Sequence[torch.Tensor], count: int) -> None:
        """Copy the core's tensors to the first `count` members. A failed one leaves the receivers' dirty."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        what = f"broadcasting weights to cells {self.members[:count]}"
        for tensor in tensors:
            flat = tensor.view(-1)
            for start in range(0, len(flat), CHUNK):
                chunk = flat[start : start + CHUNK]
                moved = chunk.cpu()
                self._run(what, lambda moved=moved: self._groups[count].broadcast([moved], options).wait())
                if self._position and moved.data_ptr() != chunk.data_ptr():
                    chunk.copy_(moved)

    def close(self) -> None:
        self._groups.clear()

    def _run(self, what: str, collective: Callable[[], Any]) -> Any:
        try:
            result = collective()
        except RuntimeError as error:  # gloo and the store know no other type
            reason = str(error).splitlines()[0]
            raise CollectiveError(f"{what} failed (generation {self.generation}): {reason}") from None
        self._progress()
        return result
