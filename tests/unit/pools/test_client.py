"""What Ray raises on a handle's stream, as this app's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError, WorkerCrashedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from app.errors import (
    AcceptTimeout,
    InternalError,
    PoolSaturated,
    PoolUnavailable,
    ReplicaLost,
    RequestError,
)
from app.pools.client import PoolClient, ReplicaStream
from app.types import Accepted, Head, Tail
from tests.support.fakes import facts


class Response:
    """A DeploymentResponseGenerator in the test's hands."""

    def __init__(self, *items: Any) -> None:
        self._items = list(items)
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        if item is None:
            await asyncio.Event().wait()
        return item

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (BackPressureError(num_queued_requests=5, max_queued_requests=5), PoolSaturated),
        (DeploymentUnavailableError(DeploymentID(name="p", app_name="a")), PoolUnavailable),
        (ActorDiedError(), ReplicaLost),
        (TaskCancelledError(), ReplicaLost),
        (RequestCancelledError("r"), ReplicaLost),
        (RayTaskError("generate", "a traceback with secrets", ValueError("secret")), InternalError),
        (WorkerCrashedError(), PoolUnavailable),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
async def test_rays_errors_are_told_as_ours(raised: Exception, expected: type[RequestError]) -> None:
    stream = ReplicaStream("p", Response(raised))
    with pytest.raises(expected, match="`p`") as caught:
        await stream.accepted(timeout_s=5)
    assert "secret" not in caught.value.message
    assert (caught.value.status == 503) == (caught.value.retry_after is not None)


async def test_the_items_of_an_answer_come_in_their_order() -> None:
    head, tail = Head(200, b"1", final=False, facts=facts()), Tail(facts())
    stream = ReplicaStream("p", Response(Accepted("replica-7"), head, b"2", tail))
    await stream.accepted(timeout_s=5)
    assert stream.replica_id == "replica-7"
    assert await stream.head() is head
    assert [item async for item in stream.rest()] == [b"2", tail]


async def test_a_pool_that_accepts_nothing_is_given_up() -> None:
    with pytest.raises(AcceptTimeout, match=r"within 0\.01 s"):
        await ReplicaStream("p", Response(None)).accepted(timeout_s=0.01)


async def test_a_replica_that_stops_in_the_middle_is_lost() -> None:
    stream = ReplicaStream("p", Response(Accepted("r")))
    await stream.accepted(timeout_s=5)
    with pytest.raises(ReplicaLost):
        await stream.head()


async def test_items_out_of_order_are_a_fault_of_ours() -> None:
    with pytest.raises(InternalError, match="broke the protocol"):
        await ReplicaStream("p", Response(b"early")).accepted(timeout_s=5)


def test_a_request_goes_to_the_streaming_method() -> None:
    class Handle:
        def options(self, **options: Any) -> Handle:
            assert options == {"stream": True}
            return self

        @property
        def generate(self) -> Handle:
            return self

        def remote(self, request: Any) -> Response:
            return Response(request)

    stream = PoolClient("p", Handle(), 5.0).dispatch("the request")  # type: ignore[arg-type]
    response: Any = stream._response
    stream.cancel()
    assert response.cancelled
