"""One stream from a replica to an ingress for the tokens of all answers between the two. Knows nothing of Ray.

An engine step gives every running answer a token. Sent one by one, the items cost far more than the tokens; here they
travel together, as one *frame* per step: for each answer that gained something, its number and its bytes. A frame is
made when the way is free, so that what accumulates meanwhile is merged. The replica's side is the `Outbox` with an
`Outlet` per answer, the ingress's the `Mailbox` of each answer.

Frames also carry the replica's state: with answers, or alone where there are none for a while.

Each answer also has a call of its own: it carries the items where there is no channel yet, and is in any case what
tells of cancellation, of errors, and of the loss of the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable

from app.types import Aborted, Frame, ReplicaItem, ReplicaState

# Serve's messages between processes may have 4 MiB unless configured otherwise.
_MAX_FRAME_BYTES = 1 << 20

# How often a replica's state is told: while it has something to do, and while it has not.
STATE_PERIOD_S = 0.05
IDLE_STATE_PERIOD_S = 1.0
STATE_NUMBER = 0


class ChannelBroken(Exception):
    """The channel ended while an answer was on it."""


class Outlet:
    """One answer's place in an Outbox."""

    __slots__ = (
        "_collect_s", "_gone", "_outbox", "_queued", "_ready", "_resumed", "_texts", "_timer", "_write", "number",
    )  # fmt: skip

    def __init__(self, outbox: Outbox, number: int, collect_s: float = 0.0) -> None:
        self._collect_s = collect_s
        self._timer: asyncio.TimerHandle | None = None
        self._outbox = outbox
        self.number = number
        self._texts: list[str] = []
        self._write: Callable[[str], bytes] | None = None
        self._ready: list[ReplicaItem] = []
        self._queued = False
        self._gone: asyncio.Future[None] | None = None
        self._resumed: asyncio.Event | None = None

    @property
    def channel(self) -> int:
        """The number of the channel."""
        return self._outbox.channel

    @property
    def paused(self) -> bool:
        """Whether the reader has asked for nothing more for now."""
        return self._resumed is not None

    async def resumed(self) -> None:
        """Wait until the reader wants more."""
        if self._resumed is not None:
            await self._resumed.wait()

    def add(self, text: str, write: Callable[[str], bytes]) -> None:
        """More text of the answer; what accumulates until it leaves becomes one event, which `write` writes."""
        self._texts.append(text)
        self._write = write
        if not self._collect_s:
            self._enqueue()
        elif self._timer is None and not self._queued:
            self._timer = asyncio.get_running_loop().call_later(self._collect_s, self._enqueue)

    def put(self, item: ReplicaItem) -> None:
        """An item that is ready, after all that came before it.

        Raises:
            ChannelBroken: it would never leave.
        """
        if self._outbox.broken:
            raise ChannelBroken
        self._flush()
        self._ready.append(item)
        self._enqueue()

    async def left(self) -> None:
        """Wait until everything has left and the reader wants more.

        Raises:
            ChannelBroken: it never will.
        """
        if self._queued:
            if self._outbox.broken:
                raise ChannelBroken
            self._gone = asyncio.get_running_loop().create_future()
            await self._gone
        await self.resumed()

    def close(self) -> None:
        """The answer has ended; what has not left by now will not."""
        self._outbox._close(self)

    def _pause(self, paused: bool) -> None:
        if paused and self._resumed is None:
            self._resumed = asyncio.Event()
        elif not paused and self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    def _enqueue(self) -> None:
        self._stop_collecting()
        if not self._queued:
            self._queued = True
            self._outbox._enqueue(self)

    def _stop_collecting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        if self._texts and self._write is not None:
            self._ready.append(self._write("".join(self._texts)))
            self._texts.clear()

    def _take(self) -> list[ReplicaItem]:
        self._flush()
        self._queued = False
        taken, self._ready = self._ready, []
        self._settle(None)
        return taken

    def _settle(self, error: ChannelBroken | None) -> None:
        if self._gone is not None and not self._gone.done():
            if error is None:
                self._gone.set_result(None)
            else:
                self._gone.set_exception(error)
        self._gone = None


class Outbox:
    """The replica's end of a channel to one ingress."""

    def __init__(self, channel: int, idle_s: float, state: Callable[[], ReplicaState]) -> None:
        """`channel`: its number. `idle_s`: seconds without any answer on it after which the channel ends.
        `state`: tells the replica's."""
        self.channel = channel
        self._idle_s = idle_s
        self._state = state
        self._is_state_due = True
        self._state_timer: asyncio.TimerHandle | None = None
        self._state_timer_s = 0.0
        self._outlets: dict[int, Outlet] = {}
        self._queue: deque[Outlet] = deque()
        self._aborted: list[tuple[int, Aborted]] = []
        self._wake = asyncio.Event()
        self.broken = False

    def open(self, number: int, collect_s: float = 0.0) -> Outlet:
        """A place for one more answer; must be closed. `collect_s`: how long text is collected before it leaves."""
        outlet = Outlet(self, number, collect_s)
        self._outlets[number] = outlet
        self._wake.set()
        return outlet

    def pause(self, number: int, paused: bool) -> None:
        """The reader of an answer wants nothing for now, or more again; unknown answers have ended."""
        outlet = self._outlets.get(number)
        if outlet is not None:
            outlet._pause(paused)

    def tell_aborted(self, number: int, aborted: Aborted) -> None:
        """What became of an answer that has no outlet any more."""
        if not self.broken:
            self._aborted.append((number, aborted))
            self._wake.set()

    def hurry(self) -> None:
        """The replica has something to do: its state is wanted soon, also where none of the answers go by this."""
        if self._state_timer is not None and self._state_timer_s > STATE_PERIOD_S:
            self._state_timer.cancel()
            self._expect_state(STATE_PERIOD_S)

    def rest(self) -> None:
        """The replica has nothing to do any more: its state leaves with what leaves next."""
        if self._state_timer is not None:
            self._state_timer.cancel()
        self._tell_state()

    async def frames(self) -> AsyncIterator[Frame]:
        """Frames, each made when it is asked for; ends when no answer has been on the channel for a while."""
        loop = asyncio.get_running_loop()
        quiet_until = loop.time() + self._idle_s
        try:
            while True:
                while not self._queue and not self._is_state_due and not self._aborted:
                    if self._outlets:
                        quiet_until = math.inf
                    elif quiet_until == math.inf:
                        quiet_until = loop.time() + self._idle_s
                    elif loop.time() >= quiet_until:
                        # Nothing is awaited between here and the caller's last look, so no answer can come too late.
                        return
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(None if quiet_until == math.inf else quiet_until):
                            await self._wake.wait()
                yield self._gather()
        finally:
            if self._state_timer is not None:
                self._state_timer.cancel()

    def _expect_state(self, seconds: float) -> None:
        self._state_timer_s = seconds
        self._state_timer = asyncio.get_running_loop().call_later(seconds, self._tell_state)

    def _tell_state(self) -> None:
        self._is_state_due = True
        self._wake.set()

    def break_up(self) -> None:
        """The channel is gone: answers that are on it cannot be told to the end."""
        self.broken = True
        for outlet in self._outlets.values():
            outlet._settle(ChannelBroken())
            outlet._pause(False)

    def _gather(self) -> Frame:
        frame: Frame = []
        size = 0
        if self._is_state_due:
            self._is_state_due = False
            state = self._state()
            frame.append((STATE_NUMBER, state))
            self._expect_state(STATE_PERIOD_S if any(state.sequences.values()) else IDLE_STATE_PERIOD_S)
        frame += self._aborted
        self._aborted.clear()
        while self._queue and size < _MAX_FRAME_BYTES:
            outlet = self._queue.popleft()
            for item in outlet._take():
                frame.append((outlet.number, item))
                size += len(item) if isinstance(item, bytes) else 0
        return frame

    def _enqueue(self, outlet: Outlet) -> None:
        self._queue.append(outlet)
        self._wake.set()

    def _close(self, outlet: Outlet) -> None:
        self._outlets.pop(outlet.number, None)
        outlet._stop_collecting()
        outlet._pause(False)
        if outlet._queued:
            self._queue.remove(outlet)
            outlet._queued = False
        # Without answers it waits in another way.
        self._wake.set()
        outlet._settle(None)


class Mailbox:
    """The ingress's end of the way of one answer.

    `full` is called with True when more than `limit` bytes wait for the reader, and with False when none do any more.
    """

    __slots__ = ("_emptied", "_error", "_full", "_is_full", "_items", "_limit", "_size", "_waiter")

    def __init__(self, limit: int, full: Callable[[bool], None]) -> None:
        self._limit = limit
        self._full = full
        self._is_full = False
        self._items: deque[ReplicaItem] = deque()
        self._size = 0
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None

    def put(self, item: ReplicaItem) -> None:
        """The next item."""
        self._items.append(item)
        if isinstance(item, bytes):
            self._size += len(item)
            if self._size > self._limit and not self._is_full:
                self._is_full = True
                self._full(True)
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come; what is here can still be taken."""
        if self._error is None:
            self._error = error
        self._notify()

    async def has_room(self) -> None:
        """Wait while more than the limit is here."""
        while self._is_full:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    async def take(self) -> ReplicaItem:
        """The next item; where it is bytes, with all bytes that follow it here.

        Raises:
            what `fail` was given, once everything before it has been taken.
        """
        items = self._items
        while not items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = items.popleft()
        if not isinstance(item, bytes):
            return item
        if items and isinstance(items[0], bytes):
            pieces = [item]
            while items and isinstance(items[0], bytes):
                pieces.append(items.popleft())  # type: ignore[arg-type]
            item = b"".join(pieces)
        self._size = 0
        if self._is_full:
            self._is_full = False
            self._full(False)
            if self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)
        return item

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
