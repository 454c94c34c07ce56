"""Sends a scenario's requests to a server and notes what comes back. Real seconds = simulated ones * `scale`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass

import aiohttp

from scripts.fleet.scenarios import NOBODY, TARGETS, Kind, Offer, Scenario, draw, open_offers


@dataclass
class Outcome:
    """One request; times in simulated seconds from the scenario's begin. `tokens`: what it got; `in_time`: of them,
    before the scenario's end; `predicted`: the TTFT that the server announced."""

    service_class: str
    key: str
    sent: float
    prompt_tokens: int
    wanted: int
    status: int = 0
    first: float | None = None
    last: float | None = None
    ended: float = 0.0
    tokens: int = 0
    in_time: int = 0
    predicted: float | None = None
    pool: str = ""
    error: str | None = None
    queue_s: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from sent to first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def is_complete(self) -> bool:
        """Whether it got all that it asked for."""
        return self.error is None and self.status == 200 and self.tokens == self.wanted

    @property
    def is_good(self) -> bool:
        """Whether it got all, within its class's targets."""
        targets = TARGETS[self.service_class]
        if not self.is_complete or targets is None:
            return self.is_complete
        base, per_1k, tpot = targets
        assert self.ttft is not None
        return self.ttft <= base + per_1k * self.prompt_tokens / 1000 and (self.tpot is None or self.tpot <= tpot)


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. `tiers`: whether the server knows `x-priority`."""

    port: int
    model: str
    scale: float
    has_classes: bool = True


class Generator:
    """One run of a scenario."""

    def __init__(self, endpoint: Endpoint, scenario: Scenario, seed: int) -> None:
        self._endpoint = endpoint
        self._scenario = scenario
        self._seed = seed
        self._numbers = itertools.count(1)
        self._begin = 0.0
        self.outcomes: list[Outcome] = []

    def now(self) -> float:
        """Simulated seconds since the begin."""
        return (time.monotonic() - self._begin) / self._endpoint.scale

    async def _until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, (at - self.now()) * self._endpoint.scale))

    async def run(self) -> list[Outcome]:
        """All requests; those of closed loops that are unfinished at the end are left."""
        scenario = self._scenario
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._begin = time.monotonic()
            loops = [
                asyncio.create_task(self._loop(session, source.kind, f"{self._seed}-{index}-{number}"))
                for index, source in enumerate(scenario.sources)
                for number in range(source.concurrency)
            ]
            tasks = []
            for offer in open_offers(scenario, self._seed):
                await self._until(offer.at)
                tasks.append(asyncio.create_task(self._send(session, offer)))
            await self._until(scenario.seconds)
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            _, late = await asyncio.wait(tasks, timeout=15 * self._endpoint.scale) if tasks else (None, ())
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.outcomes

    async def _loop(self, session: aiohttp.ClientSession, kind: Kind, seed: str) -> None:
        random_ = random.Random(seed)
        while True:
            outcome = await self._send(session, draw(kind, self.now(), random_))
            if not outcome.is_complete:
                await asyncio.sleep(self._endpoint.scale)

    async def _send(self, session: aiohttp.ClientSession, offer: Offer) -> Outcome:
        kind = offer.kind
        number = next(self._numbers)
        outcome = Outcome(kind.service_class, kind.key, self.now(), offer.prompt_tokens, offer.output_tokens)
        self.outcomes.append(outcome)
        body = {
            "model": self._endpoint.model,
            # No two prompts begin alike.
            "prompt": [1000 + number % 40_000] * offer.prompt_tokens,
            "max_tokens": offer.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"x-priority": kind.service_class} if self._endpoint.has_classes else {}
        if self._scenario.keys:
            headers["authorization"] = f"Bearer {kind.key or NOBODY}"
        url = f"http://127.0.0.1:{self._endpoint.port}/v1/completions"
        try:
            async with session.post(url, json=body, headers=headers) as answer:
                outcome.status = answer.status
                if answer.status != 200:
                    outcome.error = (await answer.text())[:300]
                    return outcome
                predicted = answer.headers.get("x-sluice-predicted-ttft-ms")
                outcome.predicted = float(predicted) / 1000 / self._endpoint.scale if predicted else None
                outcome.pool = answer.headers.get("x-sluice-pool", "")
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        self._note(outcome, json.loads(line[6:]))
        except (OSError, aiohttp.ClientError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:300]
        finally:
            outcome.ended = self.now()
        return outcome

    def _note(self, outcome: Outcome, chunk: dict[str, object]) -> None:
        now = self.now()
        if "error" in chunk:
            outcome.error = str(chunk["error"])[:300]
        elif chunk["choices"]:
            outcome.first = now if outcome.first is None else outcome.first
            outcome.last = now
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            outcome.tokens = usage["completion_tokens"]
            metrics = chunk.get("metrics")
            if isinstance(metrics, dict) and metrics.get("queue_time_ms") is not None:
                outcome.queue_s = metrics["queue_time_ms"] / 1000 / self._endpoint.scale
