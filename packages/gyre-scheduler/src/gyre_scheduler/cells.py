"""Cells and the standalone pool: roles, order, and which execution sits where.

Invariant: every launched, unfinished execution has exactly one place. A cell in transition counts in neither
role. Reroute order (section 4.3): the standalone pool first, then rollout cells in descending index, since
those stay in rollout longest.

    rollout -> to_training -> training -> to_rollout -> restored -> rollout
                                              (core) └-----------------^
    any -> lost -> rollout | restored          any -> gone
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .actions import STANDALONE, Destination
from .errors import ProtocolError
from .waterlevel import rollout_capacity

AWAY = ("lost", "gone")


class CellTable:
    """Roles and places. `serving`: cells that may hold executions at all (async: not the training ones)."""

    def __init__(self, limits: Iterable[int], standalone: int, serving: Iterable[int]):
        self.limits = tuple(limits)
        self.standalone = standalone
        self.serving = frozenset(serving)
        self.roles = ["rollout"] * len(self.limits)
        self.places: dict[Destination, dict[str, None]] = {cell: {} for cell in range(len(self.limits))}
        self.places[STANDALONE] = {}
        self.place_of: dict[str, Destination] = {}

    def with_role(self, role: str) -> list[int]:
        """Cells with this role, ascending."""
        return [cell for cell, found in enumerate(self.roles) if found == role]

    def admitting(self) -> list[int]:
        """Cells that take executions now, ascending."""
        return [cell for cell in self.with_role("rollout") if cell in self.serving]

    def capacity(self, without: Iterable[int] = ()) -> int:
        """Rollout capacity in executions (Eq. 3), as if the cells `without` had left."""
        left = set(without)
        return rollout_capacity((self.limits[c] for c in self.admitting() if c not in left), self.standalone)

    def limit(self, place: Destination) -> int:
        return self.standalone if place == STANDALONE else self.limits[place]

    def destinations(self) -> list[Destination]:
        """Places that take executions, in reroute order."""
        cells: list[Destination] = list(reversed(self.admitting()))
        return [STANDALONE, *cells] if self.standalone else cells

    def free_place(self) -> Destination | None:
        """Where the next execution launches: the place with the smallest share in use, or None if full."""
        open_places = [place for place in self.destinations() if len(self.places[place]) < self.limit(place)]
        return min(open_places, key=self._share, default=None)

    def put(self, execution: str, place: Destination) -> None:
        self.places[place][execution] = None
        self.place_of[execution] = place

    def release(self, execution: str) -> None:
        del self.places[self.place_of.pop(execution)][execution]

    def leave(self, cell: int) -> dict[str, Destination]:
        """Reserve a slot elsewhere for each execution of a cell that left; ProtocolError if none is free."""
        places = self.destinations()
        moves: dict[str, Destination] = {}
        for execution in list(self.places[cell]):
            place = next((p for p in places if len(self.places[p]) < self.limit(p)), None)
            if place is None:
                raise ProtocolError(f"cell {cell} leaves rollout but nothing has room for {execution}")
            self._move(execution, place, moves)
        return moves

    def flee(self, cell: int) -> dict[str, Destination]:
        """Like `leave` for a lost cell: with nothing free, the least loaded place exceeds its limit."""
        places = self.destinations()
        moves: dict[str, Destination] = {}
        for execution in list(self.places[cell]):
            free = next((p for p in places if len(self.places[p]) < self.limit(p)), None)
            self._move(execution, min(places, key=self._share) if free is None else free, moves)
        return moves

    def _move(self, execution: str, place: Destination, moves: dict[str, Destination]) -> None:
        self.release(execution)
        self.put(execution, place)
        moves[execution] = place

    def _share(self, place: Destination) -> float:
        return len(self.places[place]) / self.limit(place)

    def to_state(self) -> dict[str, Any]:
        """JSON-able snapshot of roles and places."""
        return {"roles": list(self.roles), "places": {str(p): list(held) for p, held in self.places.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self.roles = list(state["roles"])
        for name, executions in state["places"].items():
            for execution in executions:
                self.put(execution, STANDALONE if name == STANDALONE else int(name))
