"""Which prefills a step computes, and how much of each: the decisions of the deadline scheduler. Pure.

Times are seconds on the scheduler's clock, or durations in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from app.engine.step_time import StepWork

# A smaller piece of a prompt costs a step's overhead for next to no progress.
MIN_CHUNK_TOKENS = 64
# Requests whose deadlines have passed come first in one step of this many, so that they end however many others come.
LATE_TURN = 4
# Among late ones, how many seconds longer another one must be late to make up for each second of work that it has more.
LATE_STRETCH = 2.0
# How many times longer than one that is in time a late one may be and still come before it.
LATE_SIZE = 4.0

_Key = TypeVar("_Key")


class StepTimes(Protocol):
    """What is asked of a step-time model."""

    def seconds(self, work: StepWork) -> float:
        """How long a step takes."""
        ...

    def prefill_tokens_within(self, work: StepWork, seconds: float, depth: int, most: int) -> int:
        """How many prefill tokens fit."""
        ...


@dataclass(slots=True)
class Candidate(Generic[_Key]):
    """A prefill that could be in the step.

    `need`: tokens still to compute; `depth`: tokens of its prompt before them; `has_target`: it was promised a TTFT,
    or has a TPOT to keep; `is_running`: it has a slot and KV blocks.
    """

    key: _Key
    deadline: float
    need: int
    depth: int
    has_target: bool
    is_running: bool


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large the step may be.

    `soft_s`: seconds that it should take at most; `hard_s`: at least `soft_s`; what it may take where that ends the
    prefill of a request with a target. Both infinite for no limit. `tokens`: most prefill tokens.
    `whole_prompts`: prompts cannot be cut (chunked prefill is off).
    """

    soft_s: float
    hard_s: float
    tokens: int
    whole_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Grant(Generic[_Key]):
    """`tokens` of a candidate's prefill in this step."""

    candidate: Candidate[_Key]
    tokens: int


def with_chunk(work: StepWork, tokens: int, depth: int) -> StepWork:
    """`work` and a further chunk of prefill."""
    return work._replace(
        prefill_tokens=work.prefill_tokens + tokens,
        attended_tokens=work.attended_tokens + tokens * (depth + tokens / 2),
        prefills=work.prefills + 1,
    )


def prefill_seconds(times: StepTimes, need: int, depth: int, share: float) -> float:
    """How long a prefill takes if it comes first in every step from now on.

    `share`: which part of a step's time is left for prefill, above 0.
    """
    work = StepWork(prefill_tokens=need, attended_tokens=need * (depth + need / 2), prefills=1)
    return times.seconds(work) / share


def step_limits(
    slacks: Iterable[float], tightest_tpot: float, tightest_ttft: float, margin: float, ttft_share: float
) -> tuple[float, float]:
    """How long the next step should and may take, in seconds: (soft, hard).

    `slacks`: for each running decode with a TPOT target, the time until its next token is due;
    `tightest_tpot`, `tightest_ttft`: the smallest targets among the running decodes, and of late; infinite for none;
    `margin`: the share of the TPOT target that steps should take; `ttft_share`: the share of the TTFT target.

    A decode's tokens are due one target apart from its first token on, so the mean stays inside the target while
    single steps may be longer; one that is behind is caught up with by steps of at least half the target.
    """
    by_ttft = ttft_share * tightest_ttft
    if math.isinf(tightest_tpot):
        return by_ttft, by_ttft
    slack = min(slacks, default=tightest_tpot)
    hard = max(0.5 * tightest_tpot, min(slack, 1.5 * tightest_tpot))
    soft = min(hard, margin * tightest_tpot)
    return min(soft, by_ttft), min(hard, max(by_ttft, soft))


def fill_step(
    candidates: Iterable[Candidate[_Key]],
    work: StepWork,
    times: StepTimes,
    limits: StepLimits,
    may_run: Callable[[Candidate[_Key]], bool],
) -> list[Grant[_Key]]:
    """Grants in the candidates' order, until the step is full; `work` is what is in the step already.

    `may_run`: asked once per candidate that the step has room for, whether it has, or gets, a slot and KV blocks.

    The first one always gets something, at least `MIN_CHUNK_TOKENS` where its prompt can be cut, so that a step that is
    full with decodes alone does not stop all prefill.
    """
    grants: list[Grant[_Key]] = []
    room = limits.tokens
    for candidate in candidates:
        if room <= 0:
            break
        most = min(candidate.need, room)
        tokens = _tokens_for(candidate, most, work, times, limits)
        if limits.whole_prompts and tokens < candidate.need:
            tokens = candidate.need if not grants and room >= candidate.need else 0
            if not tokens:
                break
        elif tokens < min(MIN_CHUNK_TOKENS, most):
            if grants:
                break
            tokens = min(MIN_CHUNK_TOKENS, most)
        if not may_run(candidate):
            continue
        grants.append(Grant(candidate, tokens))
        work = with_chunk(work, tokens, candidate.depth)
        room -= tokens
        if tokens < candidate.need:
            break
    return grants


def _tokens_for(candidate: Candidate[_Key], most: int, work: StepWork, times: StepTimes, limits: StepLimits) -> int:
    if math.isinf(limits.soft_s):
        return most
    if candidate.has_target and limits.hard_s > limits.soft_s and most == candidate.need:
        whole = with_chunk(work, most, candidate.depth)
        if times.seconds(whole) <= limits.hard_s:
            return most
    return times.prefill_tokens_within(work, limits.soft_s, candidate.depth, most)
