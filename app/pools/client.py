"""Calls pools through Ray Serve handles: the one place that knows Ray's errors and turns them into this app's.

Relies on Ray Serve raising, on a handle's stream, BackPressureError, DeploymentUnavailableError, ActorDiedError and
RayTaskError, and on `DeploymentResponseGenerator.cancel()` reaching a request that still waits for a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.errors import AcceptTimeout, InternalError, PoolSaturated, PoolUnavailable, ReplicaLost, RequestError
from app.pools import members
from app.pools.channel import Mailbox
from app.types import (
    Aborted,
    Accepted,
    EngineRequest,
    Head,
    OpenChannel,
    PauseAnswer,
    PoolHealth,
    ReplicaItem,
    ReplicaState,
    Tail,
)

logger = logging.getLogger("ray.serve.sluice.pools")

# About what a replica needs to start again.
_UNAVAILABLE_RETRY_AFTER_S = 5.0
# How much of an answer may wait here for its reader before its replica is asked to hold it back.
MAILBOX_BYTES = 256 << 10
_CHANNEL_OPEN_S = 10.0
_CHANNEL_LAG_S = 5.0
# How long a replica may take to tell what became of a request that was cancelled.
_ABORT_S = 5.0
# Until a channel that broke is opened again, while its replica is said to be there.
_REOPEN_S = 0.5


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

    def __init__(self, pool: PoolClient, number: int, response: Any) -> None:
        self._pool = pool
        self._number = number
        self._response = response
        self._mailbox = Mailbox(MAILBOX_BYTES, self._full)
        self._reader = pool._keep(self._read_call())
        self._is_over = False
        self._aborted: asyncio.Future[Aborted | None] | None = None
        self.replica_id: str | None = None
        self.channel: int | None = None

    async def accepted(self, timeout_s: float) -> None:
        """Wait until a replica has taken the request.

        Raises:
            AcceptTimeout: none has within `timeout_s` seconds.
            RequestError: the pool refused it, or the replica died.
        """
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._mailbox.take()
        except TimeoutError:
            raise AcceptTimeout(
                f"No replica of pool `{self._pool.name}` accepted the request within {timeout_s:g} s.",
                retry_after=_UNAVAILABLE_RETRY_AFTER_S,
            ) from None
        if not isinstance(item, Accepted):
            raise self._broken_protocol()
        self.replica_id = item.replica_id
        self._pool._reached(item.replica_id)

    async def head(self) -> Head:
        """Wait for the answer's status and first bytes."""
        item = await self._mailbox.take()
        if not isinstance(item, Head):
            raise self._broken_protocol()
        return item

    async def more(self) -> bytes | Tail:
        """What follows the head of a streamed answer, merged while it waited; the last item is a Tail."""
        item = await self._mailbox.take()
        if isinstance(item, bytes):
            return item
        if not isinstance(item, Tail):
            raise self._broken_protocol()
        return item

    def cancel(self) -> None:
        """Stop the request wherever it is; harmless after its end."""
        if self.channel is not None and not self._is_over and self._aborted is None:
            self._aborted = self._pool._expect_aborted(self._number)
        self._pool._ended(self._number)
        self._response.cancel()
        self._reader.cancel()

    async def aborted(self) -> Aborted | None:
        """What became of it after it was cancelled; None where the replica does not tell in time."""
        return None if self._aborted is None else await self._aborted

    def deliver(self, item: ReplicaItem, channel: int | None) -> None:
        """An item that came by a channel, or by the request's own call."""
        self.channel = channel
        self._mailbox.put(item)
        if isinstance(item, Tail) or (isinstance(item, Head) and item.final):
            self._is_over = True
            self._pool._ended(self._number)

    def lose(self) -> None:
        """Nothing more will come from the replica."""
        self._mailbox.fail(self._lost())

    async def _read_call(self) -> None:
        """Read the request's own call: it carries the items where there is no channel, and tells how it ended.

        It is read to its end, so that Ray counts it as done, not as abandoned.
        """
        try:
            with _ray_errors(self._pool.name):
                async for item in self._response:
                    self.deliver(item, None)
                    await self._mailbox.has_room()
        except RequestError as error:
            self._mailbox.fail(error)
            return
        if not self._is_over and (self.channel is not None or self.replica_id is None):
            # The channel may be a moment behind the call.
            await asyncio.sleep(_CHANNEL_LAG_S)
        if not self._is_over:
            self.lose()

    def _full(self, full: bool) -> None:
        if self.channel is not None and self.replica_id is not None:
            self._pool._ask_to_pause(self.replica_id, self._number, full)

    def _lost(self) -> ReplicaLost:
        return ReplicaLost(f"The replica of pool `{self._pool.name}` stopped answering; please retry.")

    def _broken_protocol(self) -> InternalError:
        return InternalError(f"The replica of pool `{self._pool.name}` broke the protocol.")


class PoolWatcher(Protocol):
    """Is told of a pool's replicas."""

    def set_replicas(self, pool: str, replica_ids: frozenset[str]) -> None:
        """The pool has these now."""

    def learn(self, pool: str, state: ReplicaState) -> None:
        """One of them told its state."""

    def lose(self, pool: str, replica_id: str) -> None:
        """One of them stopped answering."""


class PoolClient:
    """Sends requests to one pool, and keeps a channel to each of its replicas."""

    def __init__(self, name: str, handle: Any, accept_timeout_s: float) -> None:
        self.name = name
        self.accept_timeout_s = accept_timeout_s
        self._watcher: PoolWatcher | None = None
        self._members: frozenset[str] = frozenset()
        # Names this process on its channels.
        self._ingress = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._streams: dict[int, ReplicaStream] = {}
        # Cancelled answers whose replicas have yet to tell what became of them.
        self._aborted: dict[int, asyncio.Future[Aborted | None]] = {}
        self._channels: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # By gRPC instead of Ray's object store; and nothing here needs more than plain pickle, which is a few times
        # faster than Serve's default.
        handle = handle.options(_by_reference=False, request_serialization="pickle", response_serialization="pickle")
        self._generate = handle.options(stream=True).generate
        self._frames = handle.options(stream=True).frames
        self._pause = handle.pause

    def watch(self, watcher: PoolWatcher) -> None:
        """Tell `watcher` of the pool's replicas from now on."""
        self._watcher = watcher
        members.watch(self.name, self._set_members)

    def _set_members(self, replica_ids: frozenset[str]) -> None:
        self._members = replica_ids
        if self._watcher is not None:
            self._watcher.set_replicas(self.name, replica_ids)
        for replica_id in replica_ids:
            self._reached(replica_id)

    def dispatch(self, request: EngineRequest) -> ReplicaStream:
        """Hand a request to Ray, which gives it to a replica."""
        number = next(self._numbers)
        request = dataclasses.replace(request, ingress=self._ingress, number=number)
        with _ray_errors(self.name):
            stream = ReplicaStream(self, number, self._generate.remote(request))
        # Known before anything can arrive for it by a channel.
        self._streams[number] = stream
        return stream

    def _reached(self, replica_id: str) -> None:
        if replica_id not in self._channels:
            self._channels[replica_id] = asyncio.create_task(self._run_channel(replica_id, next(self._numbers)))

    def _reopen(self, replica_id: str) -> None:
        if replica_id in self._members:
            self._reached(replica_id)

    def _ended(self, number: int) -> None:
        self._streams.pop(number, None)

    def _expect_aborted(self, number: int) -> asyncio.Future[Aborted | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Aborted | None] = loop.create_future()
        self._aborted[number] = future
        loop.call_later(_ABORT_S, self._tell_aborted, number, None)
        return future

    def _tell_aborted(self, number: int, aborted: Aborted | None) -> None:
        future = self._aborted.pop(number, None)
        if future is not None and not future.done():
            future.set_result(aborted)

    async def _run_channel(self, replica_id: str, channel: int) -> None:
        """Open a channel to a replica and give what it brings to the answers, until the replica ends it.

        Replicas end those without answers; while a replica is a member, it is opened again.
        """
        response = None
        streams = self._streams
        broke = True
        try:
            with _ray_errors(self.name):
                response = self._frames.remote(OpenChannel(replica_id, self._ingress, channel))
                async with asyncio.timeout(_CHANNEL_OPEN_S):
                    await anext(response)
                async for frame in response:
                    for number, item in frame:
                        if isinstance(item, ReplicaState):
                            if self._watcher is not None:
                                self._watcher.learn(self.name, item)
                            continue
                        if isinstance(item, Aborted):
                            self._tell_aborted(number, item)
                            continue
                        # Answers whose client has left are still on their way for a moment.
                        stream = streams.get(number)
                        if stream is not None:
                            stream.deliver(item, channel)
                broke = False
        except (RequestError, TimeoutError) as error:
            logger.info("the channel to replica %s of pool %s ended: %s", replica_id, self.name, error)
        finally:
            del self._channels[replica_id]
            if response is not None:
                response.cancel()
            for stream in list(streams.values()):
                if stream.channel == channel:
                    stream.lose()
            if broke and self._watcher is not None:
                self._watcher.lose(self.name, replica_id)
            if replica_id in self._members:
                asyncio.get_running_loop().call_later(_REOPEN_S if broke else 0, self._reopen, replica_id)

    def _ask_to_pause(self, replica_id: str, number: int, paused: bool) -> None:
        self._keep(self._send_pause(PauseAnswer(replica_id, self._ingress, number, paused)))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that lives until its end, whoever forgets it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_pause(self, request: PauseAnswer) -> None:
        # A replica that cannot be told any more has lost the answer anyway.
        with contextlib.suppress(RequestError), _ray_errors(self.name):
            await self._pause.remote(request)


def listening_host() -> str:
    """The address at which Ray Serve listens for requests, as it was started. Blocks for a moment."""
    client = _get_global_client()
    assert client is not None
    return client.http_config.host or "127.0.0.1"


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


class Peers:
    """The app's other ingress replicas, and this one."""

    _TIMEOUT_S = 10.0

    def __init__(self, app_name: str, deployment: str) -> None:
        self._app_name = app_name
        self._deployment = deployment

    async def ask(self, method: str, *args: Any) -> Any:
        """The first answer of theirs that is not None; None where there is none.

        Raises:
            RequestError: they cannot be asked.
        """
        return next((answer for answer in await self.ask_all(method, *args) if answer is not None), None)

    async def ask_all(self, method: str, *args: Any) -> list[Any]:
        """All their answers.

        Raises:
            RequestError: they cannot be asked.
        """
        handle = serve.get_deployment_handle(self._deployment, self._app_name)
        with _ray_errors(self._deployment):
            return list(await handle.broadcast(method, *args).results_async(timeout_s=self._TIMEOUT_S))
