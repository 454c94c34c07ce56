"""What crosses process boundaries between ingress and replicas, and the words for it. Everything here pickles."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

JsonObject = dict[str, Any]

Route = Literal["chat", "completions"]

# How a request ended. rejected: before it was dispatched, or refused by the engine as it stands; evicted: given up
# while it waited; cancelled: the client went away; failed: a fault on the server's side.
Outcome = Literal["finished", "rejected", "evicted", "cancelled", "failed"]

# Without a TTFT target a request is ordered among those with one as if this were its, in seconds.
PATIENCE_S = 5.0

# Of a step's time, what prefill is taken to have at least when decodes fill it.
MIN_PREFILL_SHARE = 0.1

# How long a request that was preempted keeps its slot after it came back, in seconds.
MIN_RESIDENCE_S = 1.0

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


@dataclass(frozen=True, slots=True)
class EngineCauses:
    """What delayed a request in its engine; zeros where the engine does not tell.

    `waited_steps`: steps that began while it waited for its first; `ahead_tokens`, `ahead_prefills`: prompt tokens of
    others that were computed in that time, and of how many requests; `no_room_steps`: steps in which its turn had come
    and no slot or KV blocks were free. `chunks`: steps that computed parts of its prompt; `prefill_steps`: all steps
    from the first of them to its first token. `longest_gap_s`: between two of its tokens; `slow_gaps`: gaps that were
    longer than its TPOT target; `gaps`: every 16th gap, in seconds. `preempted`: when its slot or KV blocks were taken,
    on the engine's clock, or on that of the timeline that this belongs to.
    """

    waited_steps: int = 0
    ahead_tokens: int = 0
    ahead_prefills: int = 0
    no_room_steps: int = 0
    chunks: int = 0
    prefill_steps: int = 0
    longest_gap_s: float = 0.0
    slow_gaps: int = 0
    gaps: tuple[float, ...] = ()
    preempted: tuple[float, ...] = ()


NO_CAUSES = EngineCauses()


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
    causes: EngineCauses = NO_CAUSES


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
    causes: EngineCauses = NO_CAUSES


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
    targets, in seconds, None for none. `timeline` is on the clock that `clock` identifies. `sequences`: prompts times
    choices. `collect_s`: how long text of a stream is collected before it is sent. `notes`: what was changed about the
    request, told in its usage. `replica_id`: the replica that it was placed on, "" for any. `ingress` and `number` name
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
    sequences: int = 1
    collect_s: float = 0.0
    notes: tuple[str, ...] = ()
    replica_id: str = ""
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


# Deadlines by which a replica's state tells its work apart, in seconds after the state was taken: from 50 ms to 6 min,
# each half as long again as the one before.
DUE_EDGES_S = (0.0, *(0.05 * 1.5**power for power in range(23)), math.inf)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do, and how fast it is.

    `running`, `waiting`: sequences with and without a slot; `waiting_promised`: of the latter, those that have a TTFT
    target; `slots`: sequences that a step may run. `prefill_tokens`: prompt tokens still to compute; `output_tokens`:
    tokens that all answers may still get. `kv_tokens`: what the KV cache holds at most; `kv_free_tokens`: what of it is
    free. `yielding`: sequences that would give up their slots to a deadline now; `yielding_tokens`: what they have in
    the KV cache.

    Learned, in seconds, 0.0 where nothing is known yet: `decode_s`: a step of the present decodes alone; `step_s`: the
    longest that a step should take; `token_s`: what a prompt token adds to a step; `pair_s`: what each pair of tokens
    in a prompt's attention adds; `life_s`: how long sequences have a slot. `ahead`: seconds of prefill that are due by
    each of `DUE_EDGES_S`, cumulative. `arriving`: seconds of prefill that it computed per second of late, for requests
    that had at most so long when they came, cumulative: what comes before a request that has longer, though it comes
    later. `slack`: by how much first tokens that are due by each of the edges or later will be in time at least;
    infinite for none.

    `unseen_s`: how long ago, in seconds, it last looked for new requests.
    """

    running: int = 0
    waiting: int = 0
    waiting_promised: int = 0
    slots: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    kv_tokens: int = 0
    kv_free_tokens: int = 0
    yielding: int = 0
    yielding_tokens: int = 0
    decode_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    life_s: float = 0.0
    unseen_s: float = 0.0
    ahead: tuple[float, ...] = (0.0,) * len(DUE_EDGES_S)
    arriving: tuple[float, ...] = (0.0,) * len(DUE_EDGES_S)
    slack: tuple[float, ...] = (math.inf,) * len(DUE_EDGES_S)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica as it was at `taken`, in seconds on the clock that `clock` identifies.

    `sequences`: those that it has, by class. `load`: None where its engine tells none. `is_dead`: whether its engine
    died.
    """

    replica_id: str
    taken: float
    clock: ClockReading
    sequences: dict[str, int]
    load: EngineLoad | None
    is_dead: bool = False


# A replica's stream: Accepted, Head, and where the answer is streamed, SSE bytes that are ready to send and a Tail.
@dataclass(frozen=True, slots=True)
class Aborted:
    """What became of a request that was cancelled, told after the end of its answer. `at`: when its engine had dropped
    it, in seconds on the clock of its facts."""

    facts: EngineFacts
    at: float


ReplicaItem = Accepted | Head | bytes | Tail

# What a channel carries: answers' numbers and items, in the order in which they belong to each answer; what became of
# those that were cancelled; and, under the number 0, the replica's state.
Frame = list[tuple[int, ReplicaItem | Aborted | ReplicaState]]


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
