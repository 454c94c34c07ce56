"""Chooses a replica within a pool: the one that a call is meant for, or that a request was placed on.

Relies on Ray Serve's RequestRouter API: `choose_replicas(candidate_replicas, pending_request)`, `update_replicas`,
`pending_request.args`, the mixins, and that a router without FIFOMixin gives each request the replica that was chosen
for it.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter

from app.pools import members
from app.types import EngineRequest, ToReplica


class PoolRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Routes a `ToReplica` to that replica, an `EngineRequest` to the one it was placed on, all others as Serve does.

    Where the replica that a request was placed on is gone or full, Serve chooses another one.
    """

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve tells which replicas there are."""
        super().update_replicas(replicas)
        members.tell(self._deployment_id.name, frozenset(one.replica_id.unique_id for one in replicas))

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The candidates for one request, in ranks."""
        wanted = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(wanted, ToReplica):
            return [[one for one in candidate_replicas if one.replica_id.unique_id == wanted.replica_id]]
        chosen: list[list[Any]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidate_replicas, pending_request
        )
        if isinstance(wanted, EngineRequest) and wanted.replica_id:
            placed = [one for one in candidate_replicas if one.replica_id.unique_id == wanted.replica_id]
            return [placed, *chosen] if placed else chosen
        return chosen
