"""What crosses process boundaries between ingress and replicas, and the words for it. Everything here pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

JsonObject = dict[str, Any]

Route = Literal["chat", "completions"]

# How a request ended. rejected: before it was dispatched, or refused by the engine as it stands; evicted: given up
# while it waited; cancelled: the client went away; failed: a fault on the server's side.
Outcome = Literal["finished", "rejected", "evicted", "cancelled", "failed"]

# What class and pool are called before they are known: a request can end before it is classified.
UNKNOWN = "none"


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Identifies a process's monotonic clock, so that another process can place its timestamps.

    `boot_id`: the kernel's boot; processes of one boot share CLOCK_MONOTONIC. `wall_offset`: seconds to add to a
    monotonic timestamp to get Unix time.
    """

    boot_id: str
    wall_offset: float


@dataclass(slots=True)
class Timeline:
    """The timestamps and token counts of one request: the only source of what is told about where its time went.

    Timestamps are seconds on one monotonic clock, in the order in which they happen; None: has not happened.
    """

    received: float
    rendered: float | None = None
    dispatched: float | None = None
    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    first_sent: float | None = None
    finished: float | None = None

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    sequences: int = 1
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine knows of a request; timestamps in seconds on the clock that `clock` identifies."""

    clock: ClockReading
    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    sequences: int = 1
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A request that can be served.

    `prompt_token_ids`: per prompt; None where the replica must render again (multi-modal input, echo, suffix).
    `prompt_tokens`: all prompts together; `longest_prompt`: the longest of them. `max_output_tokens`: what the request
    asked for, None for up to the context's end. `sequences`: prompts times choices.
    """

    model: str
    stream: bool
    prompt_token_ids: list[list[int]] | None
    prompt_tokens: int
    longest_prompt: int
    max_output_tokens: int | None
    sequences: int
    sampling: dict[str, float | int]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A rendered and classified request on its way from the ingress to a replica.

    `body` is the client's JSON without the fields that steer the server. `prompt_token_ids` holds one list of token
    ids per prompt, or is None where the replica has to render (multi-modal input, echo). `ttft_s`, `tpot_s`: its
    targets, in seconds, None for none. `timeline` is on the clock that `clock` identifies. `ingress` and `number` name
    the answer on a channel between the two.
    """

    request_id: str
    route: Route
    body: JsonObject
    prompt_token_ids: list[list[int]] | None
    service_class: str
    service_tier: str
    pool: str
    ttft_s: float | None
    tpot_s: float | None
    timeline: Timeline
    clock: ClockReading
    trace_context: dict[str, str] = field(default_factory=dict)
    ingress: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """First item of a replica's stream: it has taken the request."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Head:
    """Second item: the answer has a status now. `body` is all of it when `final`, else the first SSE bytes."""

    status: int
    body: bytes
    final: bool
    facts: EngineFacts
    error: tuple[str, str, str | None] | None = None  # type, message, param; only where status is an error


@dataclass(frozen=True, slots=True)
class Tail:
    """Last item of a streamed answer, with its last SSE bytes. `failed`: it ended with an error event."""

    facts: EngineFacts
    failed: bool = False
    body: bytes = b""


# A replica's stream: Accepted, Head, and where the answer is streamed, SSE bytes that are ready to send and a Tail.
ReplicaItem = Accepted | Head | bytes | Tail

# What a channel carries: answers' numbers and items, in the order in which they belong to each answer.
Frame = list[tuple[int, ReplicaItem]]


@dataclass(frozen=True, slots=True)
class ToReplica:
    """Base of calls that are meant for one replica of a pool."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class OpenChannel(ToReplica):
    """Asks for the stream of frames to the ingress of that name; `channel` numbers them."""

    ingress: str
    channel: int


@dataclass(frozen=True, slots=True)
class PauseAnswer(ToReplica):
    """The reader of one answer wants nothing for now, or more again."""

    ingress: str
    number: int
    paused: bool


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """How many replicas a pool should have, and how many serve."""

    replicas: int
    healthy: int
