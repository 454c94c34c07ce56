"""A load generator for streamed chat completions over raw sockets: `python -m scripts.streaming.load`.

Reads a JSON `Load` from its standard input, keeps so many streams open, writes the line `open` when the time that
counts begins and `close` when it ends, and then one JSON line per request. It notes when bytes arrive and understands
them only afterwards, so that it costs every server under test the same little time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from scripts.streaming.tiny_model import MARK, words

_END = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """What to do: `streams` at once, each one request after the other, for `seconds` after a warm-up."""

    port: int
    path: str
    model: str
    streams: int
    seconds: float
    prompt_tokens: int = 64
    output_tokens: int = 128
    seed: int = 0


@dataclass
class Exchange:
    """One request: when it was sent, and what arrived when (seconds on this process's clock)."""

    sent: float
    stamps: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """One request, understood. `tokens`: when each arrived; `error`: None for a complete answer."""

    sent: float
    tokens: list[float]
    body_bytes: int
    events: int
    error: str | None
    counted: bool = True


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.done: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        exchange.stamps.append(time.perf_counter())
        exchange.pieces.append(data)
        if data.endswith(_END) or (data == _END[2:]) or b"content-length" in data[:400].lower():
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._finish()

    def _finish(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


class Generator:
    """Runs one Load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._stop = asyncio.Event()
        self._warm = 0
        self._all_warm = asyncio.Event()
        self._random = random.Random(load.seed)
        self._exchanges: list[tuple[Exchange, int]] = []
        self._next_prompt = load.seed * 100_003

    async def run(self) -> list[Outcome]:
        """All requests that were sent while the time counted, and those that overlapped its begin."""
        load = self._load
        workers = [asyncio.create_task(self._worker(index)) for index in range(load.streams)]
        warm = asyncio.create_task(self._all_warm.wait())
        # A worker ends before that only by failing.
        await asyncio.wait({warm, *workers}, return_when=asyncio.FIRST_COMPLETED)
        for worker in workers:
            if worker.done():
                worker.result()
        begin = time.perf_counter()
        print("open", flush=True)
        await asyncio.sleep(load.seconds)
        print("close", flush=True)
        end = time.perf_counter()
        self._stop.set()
        await asyncio.gather(*workers)
        print(json.dumps({"begin": begin, "end": end}), flush=True)
        outcomes = []
        for exchange, tokens in self._exchanges:
            outcome = understand(exchange, tokens)
            outcomes.append(dataclasses.replace(outcome, counted=begin <= exchange.sent < end))
        return outcomes

    async def _worker(self, index: int) -> None:
        load = self._load
        loop = asyncio.get_running_loop()
        connection: _Connection | None = None
        # First answers of different lengths, so that the streams do not all end at once.
        tokens = max(2, load.output_tokens * (index + 1) // load.streams)
        first = True
        while not self._stop.is_set():
            if connection is None or connection.transport is None:
                _, connection = await loop.create_connection(_Connection, "127.0.0.1", load.port)
            await self._one(connection, tokens)
            tokens = load.output_tokens
            if first:
                first = False
                self._warm += 1
                if self._warm == load.streams:
                    self._all_warm.set()
        if connection is not None and connection.transport is not None:
            connection.transport.close()

    async def _one(self, connection: _Connection, tokens: int) -> None:
        load = self._load
        self._next_prompt += 1
        body = json.dumps(
            {
                "model": load.model,
                "messages": [{"role": "user", "content": words(self._next_prompt, load.prompt_tokens)}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST {load.path} HTTP/1.1\r\nhost: 127.0.0.1:{load.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        assert connection.transport is not None
        connection.done = asyncio.get_running_loop().create_future()
        connection.exchange = exchange = Exchange(time.perf_counter())
        self._exchanges.append((exchange, tokens))
        connection.transport.write(head + body)
        await connection.done
        connection.exchange = None


async def open_all(load: Load, ramp_s: float) -> list[Outcome]:
    """One request on each of `load.streams` connections, opened evenly over `ramp_s` seconds; all answers."""
    generator = Generator(load)

    async def one(index: int) -> None:
        await asyncio.sleep(ramp_s * index / load.streams)
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", load.port)
        await generator._one(connection, load.output_tokens)
        if connection.transport is not None:
            connection.transport.close()

    await asyncio.gather(*(one(index) for index in range(load.streams)))
    return [understand(exchange, tokens) for exchange, tokens in generator._exchanges]


def understand(exchange: Exchange, tokens: int) -> Outcome:
    """What a request's bytes say, and whether they are a complete answer of `tokens` tokens."""
    arrived: list[float] = []
    text = b"".join(exchange.pieces)
    head, _, _ = text.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        return Outcome(exchange.sent, [], 0, 0, f"status {status}: {text[:200]!r}")
    size = events = 0
    finished: str | None = None
    done = False
    for stamp, event in _events(exchange):
        size += len(event) + 2
        events += 1
        if not event.startswith(b"data: "):
            return Outcome(exchange.sent, arrived, size, events, f"not an event: {event[:80]!r}")
        if event == b"data: [DONE]":
            done = True
            continue
        chunk = json.loads(event[6:])
        if "error" in chunk:
            return Outcome(exchange.sent, arrived, size, events, f"error: {event[:200]!r}")
        for choice in chunk["choices"]:
            arrived += [stamp] * (choice["delta"].get("content") or "").count(MARK)
            finished = choice.get("finish_reason") or finished
    error = None
    if not done or finished != "length" or len(arrived) != tokens:
        error = f"incomplete: {len(arrived)} of {tokens} tokens, finish_reason {finished}, done {done}"
    return Outcome(exchange.sent, arrived, size, events, error)


def _events(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """The server-sent events and when the last byte of each arrived."""
    raw = bytearray()
    body = bytearray()
    in_head = True
    for stamp, piece in zip(exchange.stamps, exchange.pieces, strict=True):
        raw += piece
        if in_head:
            end = raw.find(b"\r\n\r\n")
            if end < 0:
                continue
            del raw[: end + 4]
            in_head = False
        while True:
            line_end = raw.find(b"\r\n")
            if line_end < 0:
                break
            length = int(bytes(raw[:line_end]).split(b";")[0], 16)
            if length == 0 or len(raw) < line_end + 2 + length + 2:
                break
            body += raw[line_end + 2 : line_end + 2 + length]
            del raw[: line_end + 2 + length + 2]
        while (end := body.find(b"\n\n")) >= 0:
            yield stamp, bytes(body[:end])
            del body[: end + 2]


def main() -> int:
    """Run the load that standard input describes."""
    import uvloop

    load = Load(**json.loads(sys.stdin.readline()))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(Generator(load).run())
    for outcome in outcomes:
        print(json.dumps(dataclasses.asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
