"""The two ends of a channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.pools.channel import ChannelBroken, Mailbox, Outbox
from app.types import Aborted, Accepted, Frame, Head, ReplicaState, Tail
from tests.support.fakes import facts, no_state

ACCEPTED, HEAD, TAIL = Accepted("r"), Head(200, b"h", final=False, facts=facts()), Tail(facts())


def write(text: str) -> bytes:
    return f"<{text}>".encode()


def quiet(outbox: Outbox) -> Outbox:
    """With the first state told already."""
    outbox._is_state_due = False
    return outbox


@pytest.fixture
def outbox() -> Outbox:
    return quiet(Outbox(7, 60, no_state))


class TestFrames:
    """What leaves an Outbox, and when."""

    async def test_a_frame_holds_what_all_answers_gained(self, outbox: Outbox) -> None:
        one, two = outbox.open(1), outbox.open(2)
        one.put(ACCEPTED)
        two.add("a", write)
        one.put(HEAD)
        assert await anext(outbox.frames()) == [(1, ACCEPTED), (1, HEAD), (2, b"<a>")]

    async def test_text_that_waits_is_merged_and_stays_in_order_with_the_rest(self, outbox: Outbox) -> None:
        outlet = outbox.open(1)
        for text in ("a", "b", "c"):
            outlet.add(text, write)
        outlet.put(TAIL)
        assert await anext(outbox.frames()) == [(1, b"<abc>"), (1, TAIL)]

    async def test_a_frame_is_made_when_it_is_asked_for(self, outbox: Outbox) -> None:
        outlet, frames = outbox.open(1), outbox.frames()
        outlet.add("a", write)
        assert await anext(frames) == [(1, b"<a>")]
        # The way is not free: these wait for one another.
        outlet.add("b", write)
        outlet.add("c", write)
        assert await anext(frames) == [(1, b"<bc>")]

    async def test_a_waiting_channel_takes_the_first_item_at_once(self, outbox: Outbox) -> None:
        outlet = outbox.open(1)
        frame = asyncio.ensure_future(anext(outbox.frames()))
        await asyncio.sleep(0)
        outlet.add("a", write)
        assert await frame == [(1, b"<a>")]

    async def test_an_answer_nobody_watches_is_collected_into_larger_segments(self, outbox: Outbox) -> None:
        outlet, frames = outbox.open(1, collect_s=0.02), outbox.frames()
        outlet.put(HEAD)
        # The first token is not collected.
        assert await anext(frames) == [(1, HEAD)]
        outlet.add("a", write)
        frame = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        outlet.add("b", write)
        assert await asyncio.wait_for(frame, 5) == [(1, b"<ab>")]
        # Nor does the end wait.
        outlet.add("c", write)
        outlet.put(TAIL)
        assert await anext(frames) == [(1, b"<c>"), (1, TAIL)]
        outlet.add("d", write)
        outlet.close()

    async def test_the_state_comes_with_answers_and_without(self) -> None:
        outbox = Outbox(7, 60, no_state)
        outlet, frames = outbox.open(1), outbox.frames()
        outlet.put(ACCEPTED)
        state = no_state()
        first = await anext(frames)
        assert [number for number, _ in first] == [0, 1]
        # A request that goes by another channel hurries the next one.
        outbox.hurry()
        (number, told), *rest = await asyncio.wait_for(anext(frames), 0.5)
        assert (number, rest) == (0, [])
        assert isinstance(told, ReplicaState)
        assert told.replica_id == state.replica_id

    async def test_the_last_answer_comes_with_the_state_it_leaves_behind(self) -> None:
        outbox = Outbox(7, 60, no_state)
        outlet, frames = outbox.open(1), outbox.frames()
        await anext(frames)
        outlet.put(HEAD)
        assert await anext(frames) == [(1, HEAD)]
        outbox.rest()
        outlet.put(TAIL)
        assert [number for number, _ in await anext(frames)] == [0, 1]

    async def test_what_became_of_a_cancelled_answer_leaves_without_it(self, outbox: Outbox) -> None:
        outlet = outbox.open(1)
        outlet.add("a", write)
        outlet.close()
        frame = asyncio.ensure_future(anext(outbox.frames()))
        await asyncio.sleep(0)
        aborted = Aborted(facts(), 1.0)
        outbox.tell_aborted(1, aborted)
        assert await asyncio.wait_for(frame, 5) == [(1, aborted)]

    async def test_a_large_backlog_leaves_in_several_frames(self, outbox: Outbox) -> None:
        for number in range(4):
            outbox.open(number).put(b"x" * 600_000)
        frames = outbox.frames()
        assert [number for number, _ in await anext(frames)] == [0, 1]
        assert [number for number, _ in await anext(frames)] == [2, 3]

    async def test_what_a_closed_answer_left_behind_is_not_sent(self, outbox: Outbox) -> None:
        gone, outlet = outbox.open(1), outbox.open(2)
        gone.add("a", write)
        outlet.add("b", write)
        gone.close()
        assert await anext(outbox.frames()) == [(2, b"<b>")]

    async def test_it_ends_when_it_was_idle_and_not_while_an_answer_is_on_it(self) -> None:
        outbox = quiet(Outbox(7, 0.01, no_state))
        outlet = outbox.open(1)
        frames = outbox.frames()
        ended = asyncio.ensure_future(_rest(frames))
        await asyncio.sleep(0.05)
        assert not ended.done()
        outlet.add("a", write)
        outlet.close()
        outlet = outbox.open(2)
        outlet.put(TAIL)
        await outlet.left()
        outlet.close()
        assert await ended == [[(2, TAIL)]]


async def _rest(frames: AsyncIterator[Frame]) -> list[Frame]:
    return [frame async for frame in frames]


class TestLeaving:
    """Answers that wait until what they gave has left."""

    async def test_left_returns_when_the_frame_is_made(self, outbox: Outbox) -> None:
        outlet = outbox.open(1)
        outlet.put(b"x")
        left = asyncio.ensure_future(outlet.left())
        await asyncio.sleep(0)
        assert not left.done()
        await anext(outbox.frames())
        await left

    async def test_nothing_to_leave_is_left(self, outbox: Outbox) -> None:
        await outbox.open(1).left()

    async def test_a_paused_answer_waits_until_its_reader_wants_more(self, outbox: Outbox) -> None:
        outlet = outbox.open(1)
        outbox.pause(1, True)
        assert outlet.paused
        left = asyncio.ensure_future(outlet.left())
        await asyncio.sleep(0)
        assert not left.done()
        outbox.pause(1, False)
        await left
        assert not outlet.paused

    async def test_pausing_an_answer_that_has_ended_does_nothing(self, outbox: Outbox) -> None:
        outbox.pause(5, True)

    async def test_answers_on_a_broken_channel_fail(self, outbox: Outbox) -> None:
        outlet = outbox.open(1)
        outlet.put(b"x")
        left = asyncio.ensure_future(outlet.left())
        await asyncio.sleep(0)
        outbox.break_up()
        with pytest.raises(ChannelBroken):
            await left
        with pytest.raises(ChannelBroken):
            outlet.put(b"y")

    async def test_a_paused_answer_on_a_broken_channel_is_not_stuck(self, outbox: Outbox) -> None:
        outlet = outbox.open(1)
        outbox.pause(1, True)
        resumed = asyncio.ensure_future(outlet.resumed())
        await asyncio.sleep(0)
        outbox.break_up()
        await resumed


class TestMailbox:
    """The reader's end."""

    @staticmethod
    def box(limit: int = 10) -> tuple[Mailbox, list[bool]]:
        told: list[bool] = []
        return Mailbox(limit, told.append), told

    async def test_bytes_that_waited_come_as_one_and_never_pass_other_items(self) -> None:
        box, _ = self.box()
        for item in (HEAD, b"1", b"2", TAIL):
            box.put(item)
        assert [await box.take(), await box.take(), await box.take()] == [HEAD, b"12", TAIL]

    async def test_what_came_before_a_failure_can_still_be_taken(self) -> None:
        box, _ = self.box()
        box.put(b"1")
        box.fail(ValueError("lost"))
        assert await box.take() == b"1"
        with pytest.raises(ValueError, match="lost"):
            await box.take()

    async def test_the_first_failure_counts(self) -> None:
        box, _ = self.box()
        box.fail(ValueError("first"))
        box.fail(ValueError("second"))
        with pytest.raises(ValueError, match="first"):
            await box.take()

    async def test_a_waiting_reader_is_woken_by_items_and_failures(self) -> None:
        box, _ = self.box()
        taken = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        box.put(b"1")
        assert await taken == b"1"
        taken = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        box.fail(ValueError("lost"))
        with pytest.raises(ValueError, match="lost"):
            await taken

    async def test_it_tells_once_when_it_is_full_and_once_when_it_is_not(self) -> None:
        box, told = self.box(limit=3)
        for _ in range(3):
            box.put(b"12")
        assert told == [True]
        assert await box.take() == b"121212"
        assert told == [True, False]

    async def test_who_waits_for_room_gets_it(self) -> None:
        box, _ = self.box(limit=3)
        await box.has_room()
        box.put(b"1234")
        room = asyncio.ensure_future(box.has_room())
        await asyncio.sleep(0)
        assert not room.done()
        await box.take()
        await room

    async def test_a_reader_that_gave_up_can_come_back(self) -> None:
        box, _ = self.box()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await box.take()
        box.put(b"1")
        assert await box.take() == b"1"
