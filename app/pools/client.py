"""Calls pools through Ray Serve handles: the one place that knows Ray's errors and turns them into this app's.

Relies on Ray Serve raising, on a handle's stream, BackPressureError, DeploymentUnavailableError, ActorDiedError and
RayTaskError, and on `DeploymentResponseGenerator.cancel()` reaching a request that still waits for a replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.errors import AcceptTimeout, InternalError, PoolSaturated, PoolUnavailable, ReplicaLost, RequestError
from app.types import Accepted, EngineRequest, Head, PoolHealth, ReplicaItem, Tail

# About what a replica needs to start again.
_UNAVAILABLE_RETRY_AFTER_S = 5.0


@contextmanager
def _ray_errors(pool: str) -> Iterator[None]:
    """Turn what Ray raises into this app's errors."""
    try:
        yield
    except (RequestError, asyncio.CancelledError):
        raise
    except BackPressureError:
        raise PoolSaturated(f"The pool `{pool}` has as many waiting requests as it may have; please retry.") from None
    except DeploymentUnavailableError:
        raise PoolUnavailable(f"The pool `{pool}` is not running.", retry_after=_UNAVAILABLE_RETRY_AFTER_S) from None
    except (RayActorError, TaskCancelledError) as error:
        raise ReplicaLost(f"The replica of pool `{pool}` that had this request stopped; please retry.") from error
    except RayTaskError as error:
        raise InternalError(f"The replica of pool `{pool}` failed with {type(error.cause).__name__}.") from error
    except RayError as error:
        raise PoolUnavailable(
            f"The pool `{pool}` cannot be reached.", retry_after=_UNAVAILABLE_RETRY_AFTER_S
        ) from error


class ReplicaStream:
    """One request's answer on its way from a replica. Must be cancelled unless it was read to its end."""

    def __init__(self, pool: str, response: Any) -> None:
        self._pool = pool
        self._response = response
        self.replica_id: str | None = None

    async def accepted(self, timeout_s: float) -> None:
        """Wait until a replica has taken the request.

        Raises:
            AcceptTimeout: none has within `timeout_s` seconds.
            RequestError: the pool refused it, or the replica died.
        """
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._next()
        except TimeoutError:
            raise AcceptTimeout(
                f"No replica of pool `{self._pool}` accepted the request within {timeout_s:g} s.",
                retry_after=_UNAVAILABLE_RETRY_AFTER_S,
            ) from None
        if not isinstance(item, Accepted):
            raise InternalError(f"The replica of pool `{self._pool}` broke the protocol.")
        self.replica_id = item.replica_id

    async def head(self) -> Head:
        """Wait for the answer's status and first bytes."""
        item = await self._next()
        if not isinstance(item, Head):
            raise InternalError(f"The replica of pool `{self._pool}` broke the protocol.")
        return item

    async def rest(self) -> AsyncIterator[bytes | Tail]:
        """What follows the head of a streamed answer; the last item is a Tail."""
        while True:
            item = await self._next()
            if not isinstance(item, bytes | Tail):
                raise InternalError(f"The replica of pool `{self._pool}` broke the protocol.")
            yield item
            if isinstance(item, Tail):
                return

    async def drain(self) -> None:
        """Read to the end after a final Head, so that Ray counts the call as done, not as abandoned."""
        with _ray_errors(self._pool):
            async for _ in self._response:
                pass

    async def _next(self) -> ReplicaItem:
        with _ray_errors(self._pool):
            try:
                item: ReplicaItem = await anext(self._response)
            except StopAsyncIteration:
                raise ReplicaLost(f"The replica of pool `{self._pool}` stopped answering; please retry.") from None
            return item

    def cancel(self) -> None:
        """Stop the request wherever it is; harmless after its end."""
        self._response.cancel()


class PoolClient:
    """Sends requests to one pool."""

    def __init__(self, name: str, handle: Any, accept_timeout_s: float) -> None:
        self.name = name
        self.accept_timeout_s = accept_timeout_s
        self._generate = handle.options(stream=True).generate

    def dispatch(self, request: EngineRequest) -> ReplicaStream:
        """Hand a request to Ray, which gives it to a replica."""
        with _ray_errors(self.name):
            return ReplicaStream(self.name, self._generate.remote(request))


class HealthWatch:
    """Answers whether the pools can serve, from Serve's own view of its replicas, asked at most once a second."""

    _MAX_AGE_S = 1.0

    def __init__(self, app_name: str, pools: list[str]) -> None:
        self._app_name = app_name
        self._pools = pools
        self._asked_at = -self._MAX_AGE_S
        self._health: dict[str, PoolHealth] = {}
        self._lock = asyncio.Lock()

    async def pools(self) -> dict[str, PoolHealth]:
        """Health of every pool, at most a second old."""
        async with self._lock:
            if time.monotonic() - self._asked_at >= self._MAX_AGE_S:
                self._health = await asyncio.to_thread(self._ask)
                self._asked_at = time.monotonic()
            return self._health

    def _ask(self) -> dict[str, PoolHealth]:
        status = serve.status().applications.get(self._app_name)
        health: dict[str, PoolHealth] = {}
        for name in self._pools:
            deployment = None if status is None else status.deployments.get(name)
            states = {} if deployment is None else deployment.replica_states
            health[name] = PoolHealth(sum(states.values()), states.get("RUNNING", 0))
        return health
