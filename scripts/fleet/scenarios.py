"""Loads that a fleet of three GPUs meets: who sends what, when. All times are simulated seconds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.engine.step_cost import CostProfile, step_seconds

GPUS = 3
# A decode shares its step with about so many others.
_DECODES = 32
_CHUNK_TOKENS = 2048


# The API key of those who have none of their own, where others do.
NOBODY = "nobody"


@dataclass(frozen=True)
class Kind:
    """Requests of one class. Lengths in tokens, evenly spread; `key`: whose they are, "" for nobody's."""

    service_class: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    key: str = ""


CHAT = Kind("interactive", (120, 1600), (32, 160))
DOCUMENTS = Kind("standard", (12_000, 40_000), (32, 160))
BATCH = Kind("batch", (100, 600), (256, 512))

# Targets by class, in simulated seconds: TTFT, TTFT per 1,000 prompt tokens, TPOT.
TARGETS: Mapping[str, tuple[float, float, float] | None] = {
    "interactive": (0.5, 0.1, 0.05),
    "standard": (2.0, 0.3, 0.1),
    "batch": None,
}


@dataclass(frozen=True)
class Source:
    """An open stream of requests, `rate` a second from `begin` to `end`, or a closed loop of `concurrency`."""

    kind: Kind
    rate: float = 0.0
    concurrency: int = 0
    begin: float = 0.0
    end: float = float("inf")


@dataclass(frozen=True)
class Scenario:
    """`seconds` of load; what is measured begins at `measured_from`. `arms`: which are run. `kills_at`: when a replica
    is killed."""

    title: str
    sources: Sequence[Source]
    seconds: float = 30.0
    measured_from: float = 5.0
    arms: Sequence[str] = ("sluice",)
    kills_at: float | None = None

    @property
    def keys(self) -> frozenset[str]:
        """API keys that are used; none for none."""
        used = frozenset(source.kind.key for source in self.sources if source.kind.key)
        return used | {NOBODY} if used else used


@dataclass(frozen=True)
class Offer:
    """One request: when it is sent, and what it is."""

    at: float
    kind: Kind
    prompt_tokens: int
    output_tokens: int


def gpu_seconds(profile: CostProfile, kind: Kind) -> float:
    """How much of a GPU's time a mean request of a kind takes, by the cost model, in steps that are well filled."""
    prompt, output = sum(kind.prompt) // 2, sum(kind.output) // 2
    context = prompt + output // 2
    decodes = step_seconds(profile, _DECODES, _DECODES * context, [], 0)
    seconds, depth = 0.0, 0
    while depth < prompt:
        chunk = min(_CHUNK_TOKENS, prompt - depth)
        with_chunk = step_seconds(profile, _DECODES, _DECODES * context, [(chunk, depth)], 0)
        seconds += with_chunk - decodes
        depth += chunk
    return seconds + output * decodes / _DECODES


def scenarios(profile: CostProfile) -> dict[str, Scenario]:
    """By name. Shares of capacity are of the three GPUs' time, by `gpu_seconds`."""

    def rate(kind: Kind, share: float) -> float:
        return share * GPUS / gpu_seconds(profile, kind)

    def chat(share: float) -> Source:
        return Source(CHAT, rate(CHAT, share))

    def documents(share: float) -> Source:
        return Source(DOCUMENTS, rate(DOCUMENTS, share))

    def batch(share: float) -> Source:
        return Source(BATCH, rate(BATCH, share))

    all_arms = ("sluice", "silos", "fcfs", "ray-llm")
    one_pool = 1 / GPUS
    flood_key = Kind("interactive", (800, 1600), (32, 160), "flood")
    others = Kind(CHAT.service_class, CHAT.prompt, CHAT.output, "others")
    return {
        "mixed": Scenario("mixed load at 0.9 of capacity", [chat(0.25), documents(0.25), batch(0.4)], arms=all_arms),
        "burst": Scenario(
            "interactive burst of 2.2 pools' worth for 60 s",
            [chat(0.2), Source(BATCH, rate(BATCH, 0.1)), Source(CHAT, rate(CHAT, 2.2 * one_pool - 0.2), 0, 5, 65)],
            seconds=70,
            arms=("sluice", "silos"),
        ),
        "dials": Scenario(
            "what a class's dials trade",
            [chat(0.4), batch(0.55)],
            seconds=20,
            arms=("latency", "step-0.25", "balanced", "throughput"),
        ),
        "night": Scenario(
            "night: batch only",
            [Source(BATCH, concurrency=384)],
            seconds=40,
            measured_from=15,
            arms=("sluice", "all-batch"),
        ),
        "calm": Scenario("interactive at 0.5, nothing else", [chat(0.5)]),
        "flood": Scenario("a batch flood on top of interactive at 0.5", [chat(0.5), batch(1.0)]),
        "overload": Scenario("2 times overload", [chat(0.9), documents(0.5), batch(0.6)], arms=("sluice", "fcfs")),
        "peak": Scenario("the same mix at capacity", [chat(0.45), documents(0.25), batch(0.3)], arms=("sluice",)),
        "death": Scenario(
            "one replica dies at 0.8",
            [chat(0.3), documents(0.15), batch(0.35)],
            seconds=70,
            measured_from=10,
            kills_at=10,
        ),
        "no-key-floods": Scenario("some keys, none floods", [Source(others, rate(others, 0.2)), batch(0.2)]),
        "key-floods": Scenario(
            "one key floods", [Source(others, rate(others, 0.2)), batch(0.2), Source(flood_key, concurrency=100)]
        ),
    }


def draw(kind: Kind, at: float, random_: random.Random) -> Offer:
    """One request."""
    return Offer(at, kind, random_.randint(*kind.prompt), random_.randint(*kind.output))


def open_offers(scenario: Scenario, seed: int) -> list[Offer]:
    """All requests of the open streams, Poisson arrivals, in order."""
    offers: list[Offer] = []
    for index, source in enumerate(scenario.sources):
        if not source.rate:
            continue
        random_ = random.Random(f"{seed}-{index}")
        at = source.begin
        while (at := at + random_.expovariate(source.rate)) < min(source.end, scenario.seconds):
            offers.append(draw(source.kind, at, random_))
    return sorted(offers, key=lambda offer: offer.at)
