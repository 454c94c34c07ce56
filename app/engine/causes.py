"""What delayed a request, as its engine sees it. Pure, and cheap enough for every step and token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.types import EngineCauses

# Under which key of an engine core output's `kv_transfer_params`, which nothing else uses here, a first token tells
# what its request waited for.
WAITED_KEY = "sluice_waited"

# The fields of EngineCauses that the scheduler knows, from `waited_steps` to `prefill_steps`.
Waited = tuple[int, int, int, int, int, int]
_NOTHING: Waited = (0, 0, 0, 0, 0, 0)

# Of how many gaps between tokens one is kept.
GAP_SAMPLE = 16


@dataclass(slots=True)
class _Wait:
    """A request without a first token. `steps`, `tokens`, `begun`: the totals when it came; from its first chunk on,
    `behind` says what came between, and `steps` is the total then."""

    steps: int
    tokens: int
    begun: int
    chunks: int = 0
    no_room_at: int = -1
    no_room: int = 0
    behind: tuple[int, int, int] = (0, 0, 0)


class Waits:
    """Follows requests from their arrival in a scheduler to their first tokens, by totals over all steps."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._steps = 0
        self._tokens = 0
        self._begun = 0
        self._computing = 0

    def arrived(self, request_id: str) -> None:
        """A request came."""
        # Prefills that have begun are before it.
        self._waits[request_id] = _Wait(self._steps, self._tokens, self._begun - self._computing)

    def found_no_room(self, request_id: str) -> None:
        """Its turn came in this step, but there was no slot, or no KV blocks."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.no_room_at != self._steps:
            wait.no_room_at = self._steps
            wait.no_room += 1

    def stepped(self, prefills: Iterable[tuple[str, int]]) -> None:
        """A step was planned in which these requests get so many prompt tokens computed."""
        tokens = 0
        for request_id, chunk in prefills:
            wait = self._waits.get(request_id)
            if wait is not None:
                if not wait.chunks:
                    behind = (self._steps - wait.steps, self._tokens - wait.tokens, self._begun - wait.begun)
                    wait.behind, wait.steps = behind, self._steps
                    self._begun += 1
                    self._computing += 1
                wait.chunks += 1
            tokens += chunk
        self._steps += 1
        self._tokens += tokens

    def first_token(self, request_id: str) -> Waited | None:
        """It has its first token; None where it had one before."""
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return None
        self._computing -= bool(wait.chunks)
        return (*wait.behind, wait.no_room, wait.chunks, max(wait.chunks, self._steps - wait.steps))

    def forget(self, request_id: str) -> None:
        """It is gone."""
        self.first_token(request_id)

    def __len__(self) -> int:
        return len(self._waits)


@dataclass(slots=True)
class Gaps:
    """The gaps between one sequence's tokens, in seconds. `tpot_s`: longer ones than this are slow; `phase`: which gap
    is the first that is kept."""

    tpot_s: float
    phase: int
    last: float | None = None
    longest: float = 0.0
    slow: int = 0
    sample: list[float] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    waited: Waited = _NOTHING

    def note(self, now: float, tokens: int) -> None:
        """So many tokens came."""
        if not tokens:
            return
        if self.last is not None:
            gap = now - self.last
            if gap > self.longest:
                self.longest = gap
            if gap > self.tpot_s * tokens:
                self.slow += 1
            self.phase -= tokens
            if self.phase < 0:
                self.phase %= GAP_SAMPLE
                self.sample.append(gap / tokens)
        self.last = now


def causes(sequences: Iterable[Gaps]) -> EngineCauses:
    """Of a request's sequences, put together: of waits, the longest."""
    known = list(sequences)
    steps, tokens, prefills, no_room, chunks, prefill_steps = max((one.waited for one in known), default=_NOTHING)
    return EngineCauses(
        waited_steps=steps,
        ahead_tokens=tokens,
        ahead_prefills=prefills,
        no_room_steps=no_room,
        chunks=chunks,
        prefill_steps=prefill_steps,
        longest_gap_s=max((one.longest for one in known), default=0.0),
        slow_gaps=sum(one.slow for one in known),
        gaps=tuple(gap for one in known for gap in one.sample),
        preempted=tuple(sorted(at for one in known for at in one.preempted)),
    )
