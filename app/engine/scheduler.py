"""A vLLM scheduler that keeps each request's latency targets: `DeadlineScheduler`, a `scheduler_cls`.

Plain vLLM can use it:

    vllm serve MODEL --scheduler-cls app.engine.scheduler.DeadlineScheduler
        --additional-config '{"sluice_scheduler": {"default_tpot_ms": 50}}'

app.engine.targets says how requests carry targets. While no request has any, it schedules as vLLM's FCFS does.

**How.** Before each step it makes a plan and then has vLLM's own `schedule()` carry it out: which prefills, running or
waiting, get how many tokens, by earliest deadline (app.engine.step_plan); how long the step may take so that running
decodes keep their TPOT targets, by a step-time model that learns from the engine's own steps (app.engine.step_time);
whether a running request gives up its slot or KV blocks to a deadline that would be missed without them; and, where
decodes alone take too long, which of those without a target wait this time.

Relies on these of vLLM's Scheduler: `schedule`, `update_from_output`, `add_request`, `make_stats`, `_free_request`,
`_preempt_request`, `_update_request_with_output`, `_reserve_prefill_lookahead`, `_handle_blocked_waiting_request`; its
queues, `running`, `policy`, `max_num_active_reqs`; AsyncScheduler; and an output's `kv_transfer_params`.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from app.config import describe_validation_error
from app.engine.causes import WAITED_KEY, Waited, Waits
from app.engine.counters import Counters, encode
from app.engine.load import Arrivals, Lives, due_by_edges, encode_load, slack_by_edges
from app.engine.step_plan import (
    LATE_SIZE,
    LATE_STRETCH,
    LATE_TURN,
    MIN_CHUNK_TOKENS,
    Candidate,
    Grant,
    StepLimits,
    fill_step,
    prefill_seconds,
    step_limits,
)
from app.engine.step_time import StepTimeModel, StepWork
from app.engine.targets import FIRST_DEADLINE_MS, Targets, deadline, from_extra_args, to_priority
from app.errors import ConfigError
from app.types import MIN_PREFILL_SHARE, MIN_RESIDENCE_S, PATIENCE_S, EngineLoad

CONFIG_KEY = "sluice_scheduler"
_STATS_PERIOD_S = 0.25
# How often the load is told; what it costs grows with the requests that wait.
_LOAD_PERIOD_S = 0.05
_LOAD_COST_SHARE = 0.01
# Steps from which on the step-time model's figures are told.
_LEARNED_STEPS = 8
# How long a TTFT target steers the length of steps after the last request that had it.
_TTFT_MEMORY_S = 60.0
# A cached prefix is looked up again after this many steps of waiting.
_CACHED_PREFIX_STEPS = 32
# Waiting requests that get no slot or KV blocks, after which a step looks no further.
_MOST_REFUSED = 8
# First tokens are protected from what comes later where their prefills take up to this share of what they had: longer
# ones would keep everybody else out for most of their time.
_PROTECTED_SHARE = 0.5
# Late requests that a step looks at.
_MOST_LATE = 8
# Later than any deadline.
_LOOSE_PRIORITY = 1 << 50

_computed_tokens = attrgetter("num_computed_tokens")


class SchedulerSettings(BaseModel):
    """`additional_config.sluice_scheduler`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    default_ttft_ms: float | None = Field(
        None, gt=0, description="TTFT target of requests that carry none, in milliseconds. Default: none."
    )
    default_tpot_ms: float | None = Field(
        None, gt=0, description="TPOT target of requests that carry none, in milliseconds. Default: none."
    )
    patience_ms: float = Field(
        PATIENCE_S * 1000,
        gt=0,
        description="Requests without a TTFT target are ordered among those with one as if this were theirs, and "
        "preempted ones from then on, in milliseconds. Default: 5000.",
    )
    tpot_margin: float = Field(
        0.88,
        gt=0,
        le=1,
        description="Share of the tightest TPOT target that a step should take at most; the rest is for what the "
        "step-time model gets wrong, and for arrivals, which wait for a step's end. Default: 0.88.",
    )
    ttft_share: float = Field(
        0.15,
        gt=0,
        description="Share of the tightest TTFT target that a step may take. With asynchronous scheduling a request "
        "waits for the rest of one step and a whole one before its own. Default: 0.15.",
    )
    min_decode_share: float = Field(
        0.125,
        gt=0,
        le=1,
        description="Share of steps that a decode without a TPOT target gets at least, when decodes alone take longer "
        "than others' targets. Default: 0.125.",
    )
    max_wasted_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Share of all computed tokens that may be thrown away by taking slots or KV blocks. Default: 0.05.",
    )
    min_residence_ms: float = Field(
        MIN_RESIDENCE_S * 1000,
        ge=0,
        description="How long a request that was preempted keeps its slot after it came back, in milliseconds. "
        "Default: 1000.",
    )


@dataclass(slots=True)
class _Track:
    """What is kept of a request. `deadline`: of its first token, or, once preempted, of coming back; `due`: when its
    next token is due. Both in seconds on the scheduler's clock. `window_s`: how long it had until `deadline` when it
    came."""

    request: Request
    number: int
    targets: Targets
    deadline: float
    window_s: float
    has_deadline: bool
    tpot: float
    due: float = math.inf
    first_token: float = math.nan
    last_token: float = math.nan
    tokens: int = 0
    cached: int = 0
    cached_at_step: int = -_CACHED_PREFIX_STEPS
    returned: float = -math.inf
    lost: int = 0
    last_step: int = 0
    is_predicted_late: bool = False

    @property
    def has_target(self) -> bool:
        """Whether it was promised anything."""
        return self.has_deadline or self.tpot != math.inf

    @property
    def awaits_first_token(self) -> bool:
        """Whether `deadline` is one that was promised."""
        return self.has_deadline and not self.tokens


@dataclass(slots=True)
class _View:
    """What one step's plan goes by, and uses up. `begin`: when the step will begin; `step_s`: how long it may take;
    `share`: of a step's time that prefill gets; `free_blocks`: KV blocks that nobody has a claim to."""

    now: float
    begin: float
    step_s: float
    share: float
    free_blocks: int
    admitted: int = 0
    refused: int = 0
    taken_from: set[str] = field(default_factory=set)
    loras: set[int] | None = None
    nobody_yields: bool = False


@dataclass(order=True, slots=True)
class _Late:
    """A prefill that misses its deadline. `rank`: first the smallest; `need_s`: seconds until it can be done."""

    rank: float
    number: int
    need_s: float = field(compare=False)
    candidate: Candidate[_Track] = field(compare=False)


def _late(candidate: Candidate[_Track], need_s: float) -> _Late:
    return _Late(candidate.deadline + LATE_STRETCH * need_s, candidate.key.number, need_s, candidate)


class DeadlineQueue(RequestQueue):
    """Waiting requests by deadline, then in the order in which they came. `track`: what is kept of a request."""

    def __init__(self, track: Callable[[Request], _Track]) -> None:
        self._track = track
        self._keys: dict[str, tuple[float, int]] = {}
        self._entries: list[tuple[float, int, Request]] = []

    def add_request(self, request: Request) -> None:
        """Put it in its place."""
        track = self._track(request)
        key = (track.deadline, track.number)
        self._keys[request.request_id] = key
        bisect.insort(self._entries, (*key, request))

    def pop_request(self) -> Request:
        """Take the first."""
        if not self._entries:
            raise IndexError("pop from an empty queue")
        request = self._entries.pop(0)[2]
        del self._keys[request.request_id]
        return request

    def peek_request(self) -> Request:
        """The first."""
        if not self._entries:
            raise IndexError("peek from an empty queue")
        return self._entries[0][2]

    def prepend_request(self, request: Request) -> None:
        """Put it in its place: a queue by deadline has no front to jump to."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put each in its place."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        """Take one out; a ValueError if it isn't in."""
        key = self._keys.pop(request.request_id, None)
        if key is None:
            raise ValueError(f"{request.request_id} is not in the queue")
        del self._entries[bisect.bisect_left(self._entries, key)]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those that are in."""
        for request in requests:
            if request.request_id in self._keys:
                self.remove_request(request)

    def from_deadline(self, earliest: float) -> Iterator[Request]:
        """Those with this deadline or a later one now, in order."""
        begin = bisect.bisect_left(self._entries, (earliest,))
        return map(itemgetter(2), self._entries[begin:])

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry[2] for entry in self._entries])


def read_settings(additional_config: Any) -> SchedulerSettings:
    """The settings from vLLM's `additional_config`.

    Raises:
        ConfigError: an unknown key, or a value that is none.
    """
    try:
        return SchedulerSettings.model_validate((additional_config or {}).get(CONFIG_KEY, {}))
    except ValidationError as error:
        raise ConfigError(f"additional_config.{CONFIG_KEY}: {describe_validation_error(error)}") from None


class DeadlineScheduler(Scheduler):
    """vLLM's scheduler with plans by deadline. With asynchronous scheduling, it is an AsyncDeadlineScheduler."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    wall_clock: Callable[[], float] = staticmethod(time.time)

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> DeadlineScheduler:
        """The variant that fits the configuration."""
        if cls is DeadlineScheduler and vllm_config.scheduler_config.async_scheduling:
            cls = AsyncDeadlineScheduler
        created: DeadlineScheduler = super().__new__(cls)
        return created

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM constructs schedulers.

        Raises:
            ConfigError: the settings are wrong.
            ValueError: vLLM is configured for what this scheduler does not work with.
        """
        self.settings = read_settings(vllm_config.additional_config)
        _refuse_what_does_not_work(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        if self.need_mamba_block_aligned_split:
            raise ValueError(_refusal("Mamba layers with mamba_cache_mode align"))
        settings = self.settings
        self._default = Targets(_seconds(settings.default_ttft_ms), _seconds(settings.default_tpot_ms))
        self._patience = settings.patience_ms / 1000
        self._tracks: dict[str, _Track] = {}
        self._numbers = itertools.count()
        self._with_target = 0
        # Running requests with a TPOT target that have had their first token.
        self._tight: dict[str, _Track] = {}
        # Preempted requests whose work is not computed again yet.
        self._lost: dict[str, _Track] = {}
        # The tightest TTFT target of late, and when it was last seen.
        self._ttft_seen = (math.inf, -math.inf)
        self.waiting = DeadlineQueue(self._track)
        self.kv_holding_waiting = DeadlineQueue(self._track)
        self.times = StepTimeModel()
        self.counters = Counters()
        # Steps whose output is not here yet: (work, when it was scheduled).
        self._in_flight: deque[tuple[StepWork, float]] = deque()
        self._last_end = -math.inf
        # When a step was last planned, with the requests that had come until then.
        self._last_looked = math.inf
        # When the output that is being read came.
        self._received = -math.inf
        self._allotted: dict[str, int] = {}
        self._steps_since_late = 0
        self._stats_due = -math.inf
        self._load_due = -math.inf
        self._arrivals = Arrivals()
        self.waits = Waits()
        # First tokens of the output that is being read: what their requests waited for.
        self._told: dict[str, Waited] = {}
        self._lives = Lives()
        # The longest that the last step should have taken.
        self._soft_s = math.inf

    # What vLLM tells the scheduler.

    def add_request(self, request: Request) -> None:
        """A new request, or more input of a session."""
        if request.request_id not in self._tracks:
            self._begin_tracking(request)
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._end_tracking(request)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        track = self._tracks[request.request_id]
        # Beyond the request's own tokens lie drafts, and tokens that are not known yet: nothing that is computed twice.
        track.lost = max(track.lost, min(request.num_computed_tokens, request.num_tokens))
        track.cached_at_step = -_CACHED_PREFIX_STEPS
        self._lost[request.request_id] = track
        self._tight.pop(request.request_id, None)
        if track.tokens and self._with_target:
            # Its first token is there; from now on it is one more that waits.
            now = self.clock()
            track.deadline = now + self._patience
            request.priority = self._as_priority(track.deadline, now, self.wall_clock())
        super()._preempt_request(request, *args, **kwargs)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step."""
        now = self._last_looked = self.clock()
        prefilling = [request for request in self.running if request.is_prefill_chunk]
        if not self._with_target or self._pause_state == PauseState.PAUSED_ALL:
            self.policy = SchedulingPolicy.FCFS
            self._soft_s = math.inf
            output = super().schedule(throttle_prefills)
        else:
            self.policy = SchedulingPolicy.PRIORITY
            output = self._schedule_by_plan(now, prefilling, throttle_prefills)
        if output.total_num_scheduled_tokens:
            self._in_flight.append((self._work_of(output, prefilling), now))
            self.counters.steps += 1
            self.counters.computed_tokens += output.total_num_scheduled_tokens
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """What a step gave."""
        now = self.clock()
        if scheduler_output.total_num_scheduled_tokens and self._in_flight:
            work, scheduled = self._in_flight.popleft()
            self.times.observe(work, now - max(scheduled, self._last_end))
            self._last_end = now
        self._received = now
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        if self._told:
            for output in itertools.chain.from_iterable(one.outputs for one in by_client.values()):
                waited = self._told.get(output.request_id)
                if waited is not None:
                    output.kv_transfer_params = {WAITED_KEY: waited}
            self._told.clear()
        return by_client

    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        # Before vLLM frees a request that ends with these tokens.
        updated = super()._update_request_with_output(request, *args, **kwargs)
        if updated[0]:
            waited = self.waits.first_token(request.request_id)
            if waited is not None:
                self._told[request.request_id] = waited
        if self._with_target and updated[0]:
            self._note_tokens(self._tracks[request.request_id], len(updated[0]), self._received)
        return updated

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics; four times a second with ours in them."""
        stats = super().make_stats(*args, **kwargs)
        now = self.clock()
        if stats is not None and now >= self._stats_due:
            self._stats_due = now + _STATS_PERIOD_S
            errors = {"step_time_error_p50": self.times.error_p50, "step_time_error_p90": self.times.error_p90}
            stats.num_kv_fetch_reqs_by_stage.update(encode(self.counters, errors))
        if stats is not None and (now >= self._load_due or not self.requests):
            stats.num_kv_fetch_reqs_by_stage.update(encode_load(self.load(now)))
            self._load_due = now + max(_LOAD_PERIOD_S, (self.clock() - now) / _LOAD_COST_SHARE)
        return stats

    def load(self, now: float) -> EngineLoad:
        """What there is to do, at `now` on the scheduler's clock."""
        computing = [request for request in self.running if request.is_prefill_chunk]
        waiting = [*self.waiting, *self.kv_holding_waiting]
        decodes = len(self.running) - len(computing)
        step = StepWork(
            decodes=decodes,
            decode_tokens=decodes * (1 + self.num_spec_tokens),
            decode_context_tokens=sum(map(_computed_tokens, self.running)) - sum(map(_computed_tokens, computing)),
        )
        decode_s = step_s = token_s = pair_s = 0.0
        if self.times.steps >= _LEARNED_STEPS:
            decode_s = self.times.seconds(step) if decodes else 0.0
            room = max(MIN_CHUNK_TOKENS, self.max_num_scheduled_tokens - step.decode_tokens)
            if math.isfinite(self._soft_s):
                room = max(MIN_CHUNK_TOKENS, self.times.prefill_tokens_within(step, self._soft_s, 0, room))
            token_s, pair_s = self.times.prefill_rates(step, room)
            step_s = self._soft_s if math.isfinite(self._soft_s) else decode_s + room * token_s
        work: list[tuple[float, float, bool]] = []
        tokens = 0
        for request in computing + waiting:
            track = self._tracks[request.request_id]
            depth = request.num_computed_tokens if request.num_computed_tokens else track.cached
            need = max(0, request.num_tokens - depth)
            tokens += need
            seconds = need * token_s + need * (depth + need / 2) * pair_s
            whole = request.num_tokens * (token_s + request.num_tokens / 2 * pair_s)
            is_protected = track.awaits_first_token and whole <= _PROTECTED_SHARE * track.window_s
            work.append((track.deadline - now, seconds, is_protected))
        share = max(MIN_PREFILL_SHARE, 1 - decode_s / step_s) if step_s else 1.0
        yielding = self._would_yield(now)
        pool = self.kv_cache_manager.block_pool
        return EngineLoad(
            running=len(self.running),
            waiting=len(waiting),
            waiting_promised=sum(1 for request in waiting if self._tracks[request.request_id].has_deadline),
            slots=self.max_num_active_reqs,
            prefill_tokens=tokens,
            output_tokens=sum(max(0, one.max_tokens - one.num_output_tokens) for one in self.requests.values()),
            kv_tokens=pool.num_gpu_blocks * self.block_size,
            kv_free_tokens=pool.get_num_free_blocks() * self.block_size,
            yielding=len(yielding),
            yielding_tokens=sum(yielding),
            decode_s=decode_s,
            step_s=step_s,
            token_s=token_s,
            pair_s=pair_s,
            life_s=self._lives.seconds(now, len(self.running)),
            unseen_s=max(0.0, now - self._last_looked),
            ahead=due_by_edges((due, seconds) for due, seconds, _ in work),
            arriving=self._arrivals.per_second(now, token_s, pair_s),
            slack=slack_by_edges(work, share),
        )

    # A plan and its execution.

    def _schedule_by_plan(self, now: float, prefilling: list[Request], throttle_prefills: bool) -> Any:
        begin = self._expected_begin(now)
        step, limits = self._limits(now, begin, prefilling)
        grants = self._grants(now, begin, prefilling, step, limits)
        admitted = [grant.candidate.key.request for grant in grants if not grant.candidate.is_running]
        for request in prefilling:
            self._allotted[request.request_id] = 0
        for grant in grants:
            is_last = grant.tokens == grant.candidate.need
            # vLLM pads a lone last token to the length that drafts have.
            self._allotted[grant.candidate.key.request.request_id] = grant.tokens + is_last * self.num_spec_tokens
        waiting, self.waiting = self.waiting, FCFSRequestQueue(admitted)
        waiting.remove_requests(admitted)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._allotted.clear()
            left, self.waiting = self.waiting, waiting
            self.waiting.prepend_requests(left)
        scheduled = output.num_scheduled_tokens
        self.counters.yielded_prefills += sum(1 for request in prefilling if request.request_id not in scheduled)
        return output

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # vLLM asks this about every request before it settles how many tokens it gets; 0 passes it over.
        allotted = self._allotted.get(request.request_id)
        if allotted is not None and allotted < num_new_tokens:
            if not allotted:
                return 0
            # A prefix that was in the cache when it was looked up may be gone; prompts that cannot be cut stay whole.
            if self.scheduler_config.enable_chunked_prefill:
                num_new_tokens = allotted
        if not self.num_prefill_lookahead:
            return num_new_tokens
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return tokens

    def _limits(self, now: float, begin: float, prefilling: list[Request]) -> tuple[StepWork, StepLimits]:
        """What the decodes put into the step, without those that are held, and how much prefill may join them."""
        per_decode = 1 + self.num_spec_tokens
        decodes = len(self.running) - len(prefilling)
        context = sum(map(_computed_tokens, self.running)) - sum(map(_computed_tokens, prefilling))
        step = StepWork(decodes=decodes, decode_tokens=decodes * per_decode, decode_context_tokens=context)
        ahead = len(self._in_flight)
        tight = self._tight.values()
        soft, hard = step_limits(
            [track.due + ahead * track.tpot - begin for track in tight],
            min([track.tpot for track in tight], default=math.inf),
            self._ttft_seen[0] if now - self._ttft_seen[1] < _TTFT_MEMORY_S else math.inf,
            self.settings.tpot_margin,
            self.settings.ttft_share,
        )
        self._soft_s = soft
        if decodes and self.times.seconds(step) > hard:
            step = self._hold_decodes(step, soft, per_decode)
        spec = self.vllm_config.speculative_config
        drafts = spec.max_num_new_slots_for_drafting if spec is not None else 0
        room = min(
            self.max_num_scheduled_tokens - step.decode_tokens,
            self.scheduler_config.max_num_batched_tokens - step.decode_tokens - drafts * (step.decodes + 1),
        )
        whole = not self.scheduler_config.enable_chunked_prefill
        if not math.isinf(soft) and not whole:
            room = min(room, max(self.times.cautious_tokens() - step.decode_tokens, MIN_CHUNK_TOKENS))
        return step, StepLimits(soft, hard, room, whole)

    def _expected_begin(self, now: float) -> float:
        """When the step that is planned will begin: when those on their way have ended."""
        begin = self._last_end
        for work, scheduled in self._in_flight:
            begin = max(begin, scheduled) + self.times.seconds(work)
        return max(begin, now)

    def _hold_decodes(self, step: StepWork, seconds: float, per_decode: int) -> StepWork:
        """Leave out decodes without a TPOT target until the step takes `seconds`; those that ran last go first."""
        loose = [
            track
            for request in self.running
            if not request.is_prefill_chunk and (track := self._tracks[request.request_id]).tpot == math.inf
        ]
        loose.sort(key=lambda track: track.last_step)
        kept = max(1, math.ceil(self.settings.min_decode_share * len(loose)))
        for track in reversed(loose[kept:]):
            if self.times.seconds(step) <= seconds:
                break
            self._allotted[track.request.request_id] = 0
            self.counters.held_decodes += 1
            step = step._replace(
                decodes=step.decodes - 1,
                decode_tokens=step.decode_tokens - per_decode,
                decode_context_tokens=step.decode_context_tokens - track.request.num_computed_tokens,
            )
        for track in loose:
            if track.request.request_id not in self._allotted:
                track.last_step = self.current_step
        return step

    def _grants(
        self, now: float, begin: float, prefilling: list[Request], step: StepWork, limits: StepLimits
    ) -> list[Grant[_Track]]:
        if limits.tokens <= 0 or not (prefilling or self.waiting):
            return []
        decode_s = self.times.seconds(step)
        view = _View(
            now=now,
            begin=begin,
            step_s=decode_s if math.isinf(limits.hard_s) else limits.hard_s,
            share=0.9 if math.isinf(limits.soft_s) else max(MIN_PREFILL_SHARE, 1 - decode_s / limits.soft_s),
            free_blocks=self._free_blocks_beyond(prefilling),
        )
        running = sorted(
            (track.deadline, track.number, track) for track in (self._tracks[r.request_id] for r in prefilling)
        )
        late = self._overdue(running, view)
        self._steps_since_late += 1

        def may_run(candidate: Candidate[_Track]) -> bool:
            return candidate.is_running or self._may_admit(candidate, view)

        grants = fill_step(self._in_turn(running, late, view), step, self.times, limits, may_run)
        if any(grant.candidate.deadline < now for grant in grants):
            self._steps_since_late = 0
        return grants

    def _in_turn(
        self, running: list[tuple[float, int, _Track]], late: list[_Late], view: _View
    ) -> Iterator[Candidate[_Track]]:
        """Those that can make their deadlines, earliest first, and among them the late ones: each before the first
        that is not much shorter and that it does not make late too."""
        if late and self._steps_since_late >= LATE_TURN:
            yield late.pop(min(range(len(late)), key=lambda index: late[index].candidate.deadline)).candidate
            heapq.heapify(late)
        for track, is_running in self._by_deadline(running, view.now, math.inf):
            if view.refused >= _MOST_REFUSED:
                return
            candidate = self._candidate(track, is_running, view)
            if candidate is None:
                continue
            need_s = prefill_seconds(self.times, candidate.need, candidate.depth, view.share)
            if track.awaits_first_token and view.begin + need_s > candidate.deadline:
                self._note_hopeless(track)
                heapq.heappush(late, _late(candidate, need_s))
                continue
            room_s = min(candidate.deadline - view.begin - need_s, LATE_SIZE * need_s)
            while late and late[0].need_s <= room_s:
                yield heapq.heappop(late).candidate
            yield candidate
        while late and view.refused < _MOST_REFUSED:
            yield heapq.heappop(late).candidate

    def _overdue(self, running: list[tuple[float, int, _Track]], view: _View) -> list[_Late]:
        """A heap of those whose deadlines have passed: of the longest late ones, those that need least come first."""
        late: list[_Late] = []
        for track, is_running in self._by_deadline(running, -math.inf, view.now):
            candidate = self._candidate(track, is_running, view)
            if candidate is None:
                continue
            # Who was promised nothing does not go before who was promised something and can still get it.
            need_s = math.inf
            if track.has_deadline:
                self._note_hopeless(track)
                need_s = prefill_seconds(self.times, candidate.need, candidate.depth, view.share)
            late.append(_late(candidate, need_s))
            if len(late) >= _MOST_LATE:
                break
        heapq.heapify(late)
        return late

    def _note_hopeless(self, track: _Track) -> None:
        if track.awaits_first_token and not track.is_predicted_late:
            track.is_predicted_late = True
            self.counters.count(self.counters.predicted_ttft_misses, track.targets.service_class)

    def _by_deadline(
        self, running: list[tuple[float, int, _Track]], earliest: float, end: float
    ) -> Iterator[tuple[_Track, bool]]:
        """Running and waiting prefills with a deadline in [earliest, end), in order."""
        mine = ((key, number, track, True) for key, number, track in running if earliest <= key < end)
        others = (
            (track.deadline, track.number, track, False)
            for track in map(self._track, self.waiting.from_deadline(earliest))
        )
        for key, _, track, is_running in heapq.merge(mine, others):
            if key >= end:
                return
            yield track, is_running

    def _candidate(self, track: _Track, is_running: bool, view: _View) -> Candidate[_Track] | None:
        """What is to be computed for it; None if it can't be now."""
        request = track.request
        if request.request_id in view.taken_from:
            return None
        if is_running:
            depth = request.num_computed_tokens
            need = request.num_tokens_with_spec + request.num_output_placeholders - depth
        else:
            if self._is_blocked_waiting_status(request.status) and not self._handle_blocked_waiting_request(request):
                return None
            if request.num_stale_output_tokens and not request.drop_stale_output:
                return None
            if self.current_step - track.cached_at_step >= _CACHED_PREFIX_STEPS:
                track.cached_at_step = self.current_step
                track.cached = self._get_local_prefix_cache_hit(request)[1]
            depth = track.cached
            need = request.num_tokens - depth
        if need <= 0:
            return None
        return Candidate(track, track.deadline, need, depth, track.has_target, is_running)

    # Slots and KV blocks.

    def _free_blocks_beyond(self, prefilling: list[Request]) -> int:
        """KV blocks that are free and that running prefills won't need."""
        size = int(self.block_size)
        needed = sum(-(-(request.num_tokens - request.num_computed_tokens) // size) for request in prefilling)
        free = int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        return free - int(needed) - int(self.kv_cache_manager.watermark_blocks)

    def _may_admit(self, candidate: Candidate[_Track], view: _View) -> bool:
        """Whether a waiting request has, or gets, a slot and KV blocks."""
        if self._pause_state != PauseState.UNPAUSED or not self._lora_fits(candidate.key.request, view):
            return False
        blocks = -(-candidate.key.request.num_tokens // self.block_size)
        if not self.running and not view.admitted:
            # Nobody else holds anything: what doesn't fit now never will.
            blocks = 0
        slots = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input - view.admitted
        has_room = slots > 0 and blocks <= view.free_blocks
        if not has_room and not self._make_room(candidate, slots, blocks, view):
            self.waits.found_no_room(candidate.key.request.request_id)
            view.refused += 1
            return False
        view.admitted += 1
        view.free_blocks -= blocks
        return True

    def _lora_fits(self, request: Request, view: _View) -> bool:
        if not self.lora_config or not request.lora_request:
            return True
        if view.loras is None:
            view.loras = {running.lora_request.lora_int_id for running in self.running if running.lora_request}
        view.loras.add(request.lora_request.lora_int_id)
        if len(view.loras) <= self.lora_config.max_loras:
            return True
        view.loras.remove(request.lora_request.lora_int_id)
        return False

    def _make_room(self, candidate: Candidate[_Track], slots: int, blocks: int, view: _View) -> bool:
        """Take slots or KV blocks from running requests for a deadline that would be missed without them."""
        if not candidate.key.awaits_first_token or (view.nobody_yields and slots <= 0):
            return False
        need_s = prefill_seconds(self.times, candidate.need, candidate.depth, view.share)
        if view.begin + need_s + 2 * view.step_s < candidate.deadline - view.step_s:
            return False
        free = self.kv_cache_manager.block_pool.get_num_free_blocks
        before, missing = free(), blocks - view.free_blocks
        victims: list[_Track] = []
        freed = 0
        for victim in self._victims(candidate, view):
            if len(victims) >= 1 - slots and freed >= missing:
                break
            if not self._can_waste(victim.request.num_computed_tokens):
                break
            victims.append(victim)
            freed += victim.request.num_computed_tokens // self.block_size
        if len(victims) < 1 - slots or freed < missing:
            # A later deadline moves nobody who an earlier one doesn't.
            view.nobody_yields = not victims
            return False
        for victim in victims:
            self.running.remove(victim.request)
            view.taken_from.add(victim.request.request_id)
            self._preempt_request(victim.request, time.monotonic())
        if slots <= 0:
            self.counters.slot_preemptions += len(victims)
        else:
            self.counters.kv_preemptions += len(victims)
        view.free_blocks += free() - before
        return blocks <= view.free_blocks

    def _victims(self, candidate: Candidate[_Track], view: _View) -> Iterator[_Track]:
        """Running requests with more slack than `candidate`: without targets first, and least work lost first."""
        resident_since = view.now - self.settings.min_residence_ms / 1000
        latest = candidate.deadline + view.step_s
        choices: list[tuple[bool, int, int, _Track]] = []
        for request in self.running:
            track = self._tracks[request.request_id]
            if track.returned > resident_since:
                continue
            lost = request.num_computed_tokens
            if track.tokens and track.tpot == math.inf:
                choices.append((False, lost, track.number, track))
                continue
            until = track.due if track.tokens else track.deadline
            if until > latest and until - prefill_seconds(self.times, lost + 1, 0, view.share) > latest:
                choices.append((track.has_target, lost, track.number, track))
        choices.sort()
        return iter([choice[3] for choice in choices])

    def _can_waste(self, tokens: int) -> bool:
        return tokens <= self._may_still_waste()

    def _may_still_waste(self) -> float:
        """Computed tokens that may be thrown away."""
        at_stake = sum(track.lost for track in self._lost.values())
        return self.settings.max_wasted_share * self.counters.computed_tokens - self.counters.wasted_tokens - at_stake

    def _would_yield(self, now: float) -> list[int]:
        """Computed tokens of each request that a deadline could take a slot from now, with what may be wasted."""
        resident_since = now - self.settings.min_residence_ms / 1000
        tracks = (self._tracks[request.request_id] for request in self.running)
        loose = sorted(
            track.request.num_computed_tokens
            for track in tracks
            if track.tokens and track.tpot == math.inf and track.returned <= resident_since
        )
        budget = self._may_still_waste()
        return loose[: sum(1 for total in itertools.accumulate(loose) if total <= budget)]

    # What is kept of requests.

    def _track(self, request: Request) -> _Track:
        return self._tracks[request.request_id]

    def _begin_tracking(self, request: Request) -> None:
        now, wall = self.clock(), self.wall_clock()
        params = request.sampling_params
        targets = from_extra_args(params.extra_args if params is not None else None, self._default)
        has_deadline = targets.ttft_s is not None or request.priority >= FIRST_DEADLINE_MS
        if has_deadline:
            due = deadline(request.priority, request.arrival_time, targets.ttft_s or 0.0)
            ttft = targets.ttft_s or max(due - request.arrival_time, 0.001)
            if ttft <= self._ttft_seen[0] or now - self._ttft_seen[1] >= _TTFT_MEMORY_S:
                self._ttft_seen = (ttft, now)
        else:
            # Without targets the order in which they came here counts, as in vLLM, not their clients' clocks.
            due = wall + self._patience + request.priority
        track = _Track(
            request=request,
            number=next(self._numbers),
            targets=targets,
            deadline=now + due - wall,
            window_s=due - wall,
            has_deadline=has_deadline,
            tpot=math.inf if targets.tpot_s is None else targets.tpot_s,
        )
        request.priority = self._as_priority(track.deadline, now, wall)
        self._tracks[request.request_id] = track
        self.waits.arrived(request.request_id)
        self._with_target += track.has_target

    def _end_tracking(self, request: Request) -> None:
        track = self._tracks.pop(request.request_id, None)
        if track is None:
            return
        self._with_target -= track.has_target
        self._tight.pop(request.request_id, None)
        self._lost.pop(request.request_id, None)
        self.waits.forget(request.request_id)
        if track.tokens:
            self._lives.end()
        if request.status == RequestStatus.FINISHED_ABORTED or track.tokens < 2:
            return
        if (track.last_token - track.first_token) / (track.tokens - 1) > track.tpot:
            self.counters.count(self.counters.tpot_misses, track.targets.service_class)

    def _note_tokens(self, track: _Track, tokens: int, now: float) -> None:
        request = track.request
        if not track.tokens:
            track.first_token = now
            if track.has_deadline and now > track.deadline:
                self.counters.count(self.counters.ttft_misses, track.targets.service_class)
            # When a running request finds no KV block, vLLM takes some from the one with the largest priority.
            request.priority = _LOOSE_PRIORITY if track.tpot == math.inf else 0
        track.tokens += tokens
        track.last_token = now
        if track.tpot != math.inf:
            if request.request_id in self._tight:
                track.due += tokens * track.tpot
            elif request.status == RequestStatus.RUNNING:
                self._tight[request.request_id] = track
                track.due = now + track.tpot

    def _as_priority(self, at: float, now: float, wall: float) -> int:
        return to_priority(wall + at - now)

    def _work_of(self, output: Any, prefilling: list[Request]) -> StepWork:
        """What is in a step, and what becomes of requests that come back in it."""
        scheduled: dict[str, int] = output.num_scheduled_tokens
        requests = [request for request in prefilling if request.request_id in scheduled]
        requests += [self.requests[new.req_id] for new in output.scheduled_new_reqs]
        requests += [self.requests[req_id] for req_id in output.scheduled_cached_reqs.resumed_req_ids]
        prefill_tokens, attended, context = 0, 0.0, sum(map(_computed_tokens, self.running))
        for request in requests:
            tokens = scheduled[request.request_id]
            depth = request.num_computed_tokens - tokens
            pairs = tokens * (depth + tokens / 2)
            prefill_tokens += tokens
            attended += pairs
            part = tokens / max(1, request.num_tokens)
            self._arrivals.add(self._tracks[request.request_id].window_s, tokens, pairs, part)
            context -= request.num_computed_tokens
            if request.request_id in self._lost:
                track = self._lost.pop(request.request_id)
                self.counters.wasted_tokens += max(0, track.lost - depth)
                track.lost = 0
                track.returned = self.clock()
        self.waits.stepped((request.request_id, scheduled[request.request_id]) for request in requests)
        decodes = len(scheduled) - len(requests)
        return StepWork(
            decodes=decodes,
            decode_tokens=output.total_num_scheduled_tokens - prefill_tokens,
            decode_context_tokens=max(0, context),
            prefill_tokens=prefill_tokens,
            attended_tokens=attended,
            prefills=len(requests),
        )


class AsyncDeadlineScheduler(DeadlineScheduler, AsyncScheduler):
    """DeadlineScheduler for asynchronous scheduling: steps are planned while the one before still runs."""


def _refuse_what_does_not_work(config: Any) -> None:
    model, parallel = config.model_config, config.parallel_config
    refused = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill throttling (prefill_schedule_interval)": config.scheduler_config.prefill_schedule_interval > 1,
        "KV transfer": config.kv_transfer_config is not None,
        "encoder-cache transfer": config.ec_transfer_config is not None,
        "pooling models": model.runner_type == "pooling",
        "encoder-decoder models": model.is_encoder_decoder,
        "diffusion models": model.is_diffusion,
    }
    for what, present in refused.items():
        if present:
            raise ValueError(_refusal(what))


def _refusal(what: str) -> str:
    return f"DeadlineScheduler does not work with {what}; switch it off, or leave out scheduler_cls."


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
