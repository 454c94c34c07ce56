"""Recordings of streams, and requests by their ids."""

from __future__ import annotations

import asyncio

import pytest

from app.api.requests import Entry, Everywhere, Excerpt, Recording, Requests
from app.errors import Gone
from app.telemetry.ledger import Ledger

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


async def stream(recording: Recording, *pieces: bytes, over: bool = False) -> None:
    if recording.start is None:
        await recording.send(dict(START))
    for index, piece in enumerate(pieces):
        more = not over or index < len(pieces) - 1
        await recording.send({"type": "http.response.body", "body": piece, "more_body": more})


async def test_every_event_has_an_id_and_can_be_read_from_there() -> None:
    recording = Recording(1000)
    await stream(recording, b"data: a\n\ndata: b\n\n", b"data: c\n\n", over=True)
    assert await recording.after(0) == Excerpt(b"id: 1\ndata: a\n\nid: 2\ndata: b\n\nid: 3\ndata: c\n\n", 3, True)
    assert await recording.after(2) == Excerpt(b"id: 3\ndata: c\n\n", 3, True)
    assert await recording.after(3) == Excerpt(b"", 3, True)


async def test_who_has_everything_waits_for_more() -> None:
    recording = Recording(1000)
    await stream(recording, b"data: a\n\n")
    reading = asyncio.ensure_future(recording.after(1))
    await asyncio.sleep(0)
    assert not reading.done()
    await stream(recording, b"data: b\n\n")
    assert (await asyncio.wait_for(reading, 5)).events == b"id: 2\ndata: b\n\n"
    assert await recording.after(2, 0.001) == Excerpt(b"", 2, False)


async def test_of_a_long_stream_the_end_is_kept() -> None:
    recording = Recording(40)
    await stream(recording, *(b"data: %d\n\n" % number for number in range(1, 9)), over=True)
    with pytest.raises(Gone):
        await recording.after(0)
    assert (await recording.after(7)).events == b"id: 8\ndata: 8\n\n"
    with pytest.raises(Gone):
        await recording.after(9)


async def test_an_answer_in_one_piece_is_recorded_as_it_is() -> None:
    recording = Recording(10)
    started = asyncio.ensure_future(recording.started())
    await recording.send({"type": "http.response.start", "status": 400, "headers": []})
    await recording.send({"type": "http.response.body", "body": b'{"error": "long"}', "more_body": False})
    await asyncio.wait_for(started, 5)
    assert (recording.whole, recording.is_over, recording.is_stream) == (b'{"error": "long"}', True, False)


async def test_requests_are_their_callers() -> None:
    requests = Requests()
    cancelled: list[str] = []
    mine = Entry("r", "me", lambda: cancelled.append("mine"), Recording(100))
    theirs = Entry("r", "they", lambda: cancelled.append("theirs"))
    requests.add(mine)
    requests.add(theirs)
    assert not requests.cancel("r", "nobody")
    assert requests.cancel("r", "me")
    assert cancelled == ["mine"]
    assert requests.recording("r", "they") is None
    assert requests.recording("r", "me") is mine.recording
    for entry in (mine, mine, theirs):
        requests.remove(entry)
    assert len(requests) == 0


async def test_what_is_not_here_may_be_at_another_replica() -> None:
    asked: list[tuple[object, ...]] = []

    async def ask(*what: object) -> object:
        asked.append(what)
        return {"cancel_request": True, "read_request": Excerpt(b"e", 4, True)}[str(what[0])]

    everywhere = Everywhere(Requests(), Ledger(10), ask)
    assert await everywhere.cancel("r", "me")
    assert await everywhere.after("r", "me", 3) == Excerpt(b"e", 4, True)
    assert asked == [("cancel_request", "r", "me"), ("read_request", "r", "me", 3)]
    alone = Everywhere(Requests(), Ledger(10))
    assert not await alone.cancel("r", "me")
    with pytest.raises(Gone, match="x-sluice-resume"):
        await alone.after("r", "me", 3)
