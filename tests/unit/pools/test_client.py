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
from app.pools import client as client_module
from app.pools import members
from app.pools.client import MAILBOX_BYTES, PoolClient, ReplicaStream
from app.telemetry.timeline import read_clock
from app.types import Aborted, Accepted, EngineRequest, Head, OpenChannel, PauseAnswer, ReplicaState, Tail, Timeline
from tests.support.fakes import facts, no_state


class Response:
    """A DeploymentResponseGenerator in the test's hands: its items, errors, and None for nothing more to come."""

    def __init__(self, *items: Any) -> None:
        self._items = asyncio.Queue[Any]()
        self.put(*items)
        self.cancelled = False

    def put(self, *items: Any) -> None:
        for item in items:
            self._items.put_nowait(item)

    def end(self) -> None:
        self._items.put_nowait(StopAsyncIteration())

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A DeploymentHandle that answers each call with what the test has prepared."""

    def __init__(self) -> None:
        self.answers: list[Response] = []
        self.channels: list[Response] = []
        self.opened: list[OpenChannel] = []
        self.pauses: list[PauseAnswer] = []
        self.requests: list[EngineRequest] = []

    def options(self, **options: Any) -> Handle:
        return self

    @property
    def generate(self) -> Any:
        def remote(request: EngineRequest) -> Response:
            self.requests.append(request)
            return self.answers.pop(0)

        return Method(remote)

    @property
    def frames(self) -> Any:
        def remote(request: OpenChannel) -> Response:
            self.opened.append(request)
            return self.channels.pop(0)

        return Method(remote)

    @property
    def pause(self) -> Any:
        async def remote(request: PauseAnswer) -> None:
            self.pauses.append(request)

        return Method(remote)


class Method:
    """One method of a handle."""

    def __init__(self, remote: Any) -> None:
        self.remote = remote


def request() -> EngineRequest:
    clock = read_clock()
    return EngineRequest(
        request_id="r",
        route="chat",
        body={},
        prompt_token_ids=None,
        service_class="c",
        service_tier="default",
        pool="p",
        ttft_s=None,
        tpot_s=None,
        timeline=Timeline(received=0.0),
        clock=clock,
    )


HEAD, TAIL = Head(200, b"1", final=False, facts=facts()), Tail(facts())


class Bench:
    """A PoolClient on a Handle."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.client = PoolClient("p", self.handle, 5.0)

    def send(self, *items: Any) -> tuple[ReplicaStream, Response]:
        response = Response(*items)
        self.handle.answers.append(response)
        self.handle.channels.append(Response())
        return self.client.dispatch(request()), response

    async def accepted_on_channel(self) -> tuple[ReplicaStream, Response, Response]:
        """An answer whose items come by a channel to replica `r`, accepted; its call and the channel."""
        channel = Response("r")
        first, call = self.send(Accepted("r"))
        self.handle.channels = [channel]
        await first.accepted(5)
        first.cancel()
        call.end()
        stream, call = self.send()
        channel.put([(self.handle.requests[-1].number, Accepted("r"))])
        await stream.accepted(5)
        return stream, call, channel

    @property
    def number(self) -> int:
        return self.handle.requests[-1].number


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    tasks = [*bench.client._tasks, *bench.client._channels.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
async def test_rays_errors_are_told_as_ours(bench: Bench, raised: Exception, expected: type[RequestError]) -> None:
    stream, _ = bench.send(raised)
    with pytest.raises(expected, match="`p`") as caught:
        await stream.accepted(timeout_s=5)
    assert "secret" not in caught.value.message
    assert (caught.value.status == 503) == (caught.value.retry_after is not None)


async def test_the_items_of_an_answer_come_in_their_order(bench: Bench) -> None:
    stream, _ = bench.send(Accepted("replica-7"), HEAD, b"2", TAIL)
    await stream.accepted(timeout_s=5)
    assert stream.replica_id == "replica-7"
    assert await stream.head() is HEAD
    assert [await stream.more(), await stream.more()] == [b"2", TAIL]


async def test_a_pool_that_accepts_nothing_is_given_up(bench: Bench) -> None:
    stream, _ = bench.send()
    with pytest.raises(AcceptTimeout, match=r"within 0\.01 s"):
        await stream.accepted(timeout_s=0.01)


async def test_a_replica_that_stops_in_the_middle_is_lost(bench: Bench) -> None:
    stream, response = bench.send(Accepted("r"))
    await stream.accepted(timeout_s=5)
    response.end()
    with pytest.raises(ReplicaLost):
        await stream.head()


async def test_items_out_of_order_are_a_fault_of_ours(bench: Bench) -> None:
    stream, _ = bench.send(b"early")
    with pytest.raises(InternalError, match="broke the protocol"):
        await stream.accepted(timeout_s=5)


async def test_cancelling_an_answer_reaches_its_call(bench: Bench) -> None:
    stream, response = bench.send()
    stream.cancel()
    assert response.cancelled


class TestChannel:
    """Answers whose items come together with those of others."""

    async def test_the_first_answer_opens_a_channel_to_its_replica(self, bench: Bench) -> None:
        stream, _ = bench.send(Accepted("r"), HEAD)
        await stream.accepted(5)
        await stream.head()
        await wait_until(lambda: [opened.replica_id for opened in bench.handle.opened] == ["r"])
        assert bench.handle.opened[0].ingress == bench.handle.requests[0].ingress

    async def test_items_find_their_answers(self, bench: Bench) -> None:
        one, _, channel = await bench.accepted_on_channel()
        first = bench.number
        two, _ = bench.send()
        channel.put([(first, HEAD), (bench.number, Accepted("r")), (first, b"2"), (bench.number, HEAD)])
        channel.put([(bench.number, b"b"), (first, b"3"), (first, TAIL), (bench.number, TAIL)])
        await two.accepted(5)
        assert await one.head() is HEAD
        assert await two.head() is HEAD
        assert [await two.more(), await two.more()] == [b"b", TAIL]
        # What waited meanwhile comes as one.
        assert [await one.more(), await one.more()] == [b"23", TAIL]

    async def test_what_comes_for_an_answer_that_nobody_waits_for_is_dropped(self, bench: Bench) -> None:
        gone, _, channel = await bench.accepted_on_channel()
        number = bench.number
        gone.cancel()
        stream, _ = bench.send()
        channel.put([(number, b"late"), (bench.number, Accepted("r")), (bench.number, HEAD)])
        await stream.accepted(5)
        assert await stream.head() is HEAD

    async def test_what_became_of_a_cancelled_answer_is_told_after_its_end(self, bench: Bench) -> None:
        gone, _, channel = await bench.accepted_on_channel()
        gone.cancel()
        aborted = Aborted(facts(), 3.0)
        channel.put([(bench.number, b"late"), (bench.number, aborted)])
        assert await asyncio.wait_for(gone.aborted(), 5) is aborted

    async def test_nobody_waits_long_for_what_is_not_told(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client_module, "_ABORT_S", 0.01)
        gone, _, _ = await bench.accepted_on_channel()
        gone.cancel()
        assert await asyncio.wait_for(gone.aborted(), 5) is None
        assert not bench.client._aborted

    async def test_of_what_never_was_on_a_channel_nothing_is_expected(self, bench: Bench) -> None:
        stream, _ = bench.send()
        stream.cancel()
        assert await stream.aborted() is None

    async def test_when_it_breaks_its_answers_are_lost_and_others_are_not(self, bench: Bench) -> None:
        on_it, _, channel = await bench.accepted_on_channel()
        by_call, _ = bench.send(Accepted("r"), HEAD, b"2")
        await by_call.accepted(5)
        channel.put(ActorDiedError())
        with pytest.raises(ReplicaLost):
            await on_it.head()
        assert await by_call.head() is HEAD
        assert await by_call.more() == b"2"

    async def test_after_it_has_ended_the_next_answer_opens_another(self, bench: Bench) -> None:
        first, _, channel = await bench.accepted_on_channel()
        channel.put([(bench.number, HEAD), (bench.number, TAIL)])
        await first.head()
        await first.more()
        channel.end()
        await asyncio.gather(*bench.client._channels.values())
        second, _ = bench.send(Accepted("r"))
        await second.accepted(5)
        await wait_until(lambda: len(bench.handle.opened) == 2)
        assert bench.handle.opened[0].channel != bench.handle.opened[1].channel

    async def test_the_call_still_tells_of_errors(self, bench: Bench) -> None:
        stream, call, _ = await bench.accepted_on_channel()
        call.put(ActorDiedError())
        with pytest.raises(ReplicaLost):
            await stream.head()

    async def test_an_answer_that_the_call_ends_before_the_channel_has_told_it_all_is_complete(
        self, bench: Bench
    ) -> None:
        stream, call, channel = await bench.accepted_on_channel()
        call.end()
        await asyncio.sleep(0)
        channel.put([(bench.number, HEAD), (bench.number, TAIL)])
        assert await stream.head() is HEAD
        assert await stream.more() is TAIL

    async def test_a_reader_that_lags_pauses_its_answer_and_resumes_it(self, bench: Bench) -> None:
        stream, _, channel = await bench.accepted_on_channel()
        channel.put([(bench.number, HEAD)])
        await stream.head()
        much = b"x" * (MAILBOX_BYTES + 1)
        channel.put([(bench.number, much)])
        await wait_until(lambda: [pause.paused for pause in bench.handle.pauses] == [True])
        assert bench.handle.pauses[0].number == bench.number
        assert await stream.more() == much
        await wait_until(lambda: [pause.paused for pause in bench.handle.pauses] == [True, False])

    async def test_an_answer_without_a_channel_is_not_read_ahead_of_its_reader(self, bench: Bench) -> None:
        much = b"x" * (MAILBOX_BYTES + 1)
        stream, call = bench.send(Accepted("r"), HEAD, much, b"next", TAIL)
        await stream.accepted(5)
        await stream.head()
        await wait_until(lambda: call._items.qsize() == 2)
        await asyncio.sleep(0)
        assert call._items.qsize() == 2
        assert await stream.more() == much
        assert await stream.more() == b"next"


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # a condition of any kind
            await asyncio.sleep(0)


class Watcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.members: list[frozenset[str]] = []
        self.states: list[ReplicaState] = []
        self.lost: list[str] = []
        self.told = asyncio.Event()

    def set_replicas(self, pool: str, replica_ids: frozenset[str]) -> None:
        self.members.append(replica_ids)

    def learn(self, pool: str, state: ReplicaState) -> None:
        self.states.append(state)
        self.told.set()

    def lose(self, pool: str, replica_id: str) -> None:
        self.lost.append(replica_id)
        self.told.set()


class TestWatching:
    """Channels to all replicas, for their states."""

    @pytest.fixture(autouse=True)
    def _forget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(members, "_members", {})
        monkeypatch.setattr(members, "_told", {})
        monkeypatch.setattr(client_module, "_REOPEN_S", 0.01)

    async def test_a_channel_is_kept_to_each_replica_and_brings_its_states(self) -> None:
        handle, watcher = Handle(), Watcher()
        state = ReplicaState("r-1", 1.0, read_clock(), {}, None)
        handle.channels = [Response("r-1", [(0, state)])]
        members.tell("p", frozenset({"r-1"}))
        client = PoolClient("p", handle, 1.0)
        client.watch(watcher)
        await asyncio.wait_for(watcher.told.wait(), 5)
        assert watcher.members == [frozenset({"r-1"})]
        assert watcher.states == [state]
        assert [one.replica_id for one in handle.opened] == ["r-1"]
        await stop(client)

    async def test_one_that_breaks_is_opened_again_while_the_replica_is_there(self) -> None:
        handle, watcher = Handle(), Watcher()
        handle.channels = [Response("r-1", ActorDiedError()), Response("r-1", [(0, no_state())]), Response()]
        client = PoolClient("p", handle, 1.0)
        client.watch(watcher)
        members.tell("p", frozenset({"r-1"}))
        await asyncio.wait_for(watcher.told.wait(), 5)
        assert watcher.lost == ["r-1"]
        watcher.told.clear()
        await asyncio.wait_for(watcher.told.wait(), 5)
        assert len(watcher.states) == 1
        await stop(client)

    async def test_one_that_its_replica_ends_in_peace_loses_nobody(self) -> None:
        handle, watcher = Handle(), Watcher()
        ended = Response("r-1")
        ended.end()
        handle.channels = [ended, Response("r-1", [(0, no_state())])]
        client = PoolClient("p", handle, 1.0)
        client.watch(watcher)
        members.tell("p", frozenset({"r-1"}))
        await asyncio.wait_for(watcher.told.wait(), 5)
        assert watcher.lost == []
        await stop(client)


async def stop(client: PoolClient) -> None:
    members.tell(client.name, frozenset())
    tasks = [*client._tasks, *client._channels.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
