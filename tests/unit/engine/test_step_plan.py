"""Which prefills a step computes, and how much of each."""

from __future__ import annotations

import math
from typing import Any

from app.engine.step_plan import MIN_CHUNK_TOKENS, Candidate, StepLimits, fill_step, step_limits
from app.engine.step_time import StepWork

INFINITE = math.inf


class Linear:
    """10 ms per step, 0.02 ms per prefill token, 0.1 ms per decode."""

    def seconds(self, work: StepWork) -> float:
        return 0.010 + 2e-5 * work.prefill_tokens + 1e-4 * work.decodes

    def prefill_tokens_within(self, work: StepWork, seconds: float, depth: int, most: int) -> int:
        return max(0, min(most, int((seconds - self.seconds(work)) / 2e-5 + 1e-6)))


def candidate(key: str, need: int, **fields: Any) -> Candidate[str]:
    return Candidate(key, **{"deadline": 0.0, "depth": 0, "has_target": True, "is_running": False, **fields}, need=need)


def fill(
    candidates: list[Candidate[str]],
    soft: float = 0.050,
    hard: float | None = None,
    tokens: int = 8192,
    decodes: int = 0,
    whole_prompts: bool = False,
    refused: tuple[str, ...] = (),
) -> dict[str, int]:
    limits = StepLimits(soft, soft if hard is None else hard, tokens, whole_prompts)
    grants = fill_step(
        candidates, StepWork(decodes=decodes), Linear(), limits, lambda candidate: candidate.key not in refused
    )
    return {grant.candidate.key: grant.tokens for grant in grants}


def test_the_first_get_all_they_need_and_the_next_what_is_left() -> None:
    assert fill([candidate("a", 500), candidate("b", 5000), candidate("c", 10)]) == {"a": 500, "b": 1500}


def test_without_a_time_limit_the_tokens_are_the_limit() -> None:
    assert fill([candidate("a", 5000), candidate("b", 5000)], soft=INFINITE) == {"a": 5000, "b": 3192}


def test_decodes_leave_less_time() -> None:
    assert fill([candidate("a", 5000)], decodes=100) == {"a": 1500}


def test_a_request_with_a_target_may_end_its_prefill_in_a_longer_step() -> None:
    assert fill([candidate("a", 2400)], hard=0.060) == {"a": 2400}
    assert fill([candidate("a", 2600)], hard=0.060) == {"a": 2000}
    assert fill([candidate("a", 2400, has_target=False)], hard=0.060) == {"a": 2000}


def test_a_full_step_still_brings_the_first_prefill_on() -> None:
    assert fill([candidate("a", 5000), candidate("b", 5000)], decodes=1000) == {"a": MIN_CHUNK_TOKENS}


def test_a_remainder_too_small_to_be_worth_it_is_left() -> None:
    assert fill([candidate("a", 1990), candidate("b", 5000)]) == {"a": 1990}


def test_who_has_no_slot_is_passed_over() -> None:
    assert fill([candidate("a", 500), candidate("b", 400)], refused=("a",)) == {"b": 400}


def test_whole_prompts_are_not_cut() -> None:
    assert fill([candidate("a", 500), candidate("b", 5000)], whole_prompts=True) == {"a": 500}
    # However long a prompt takes, there is no other way.
    assert fill([candidate("a", 5000)], whole_prompts=True) == {"a": 5000}
    assert fill([candidate("a", 9000)], whole_prompts=True) == {}


def limits(slacks: list[float], tpot: float = INFINITE, ttft: float = INFINITE) -> tuple[float, float]:
    soft, hard = step_limits(slacks, tpot, ttft, margin=0.9, ttft_share=0.25)
    return round(soft, 9), round(hard, 9)


def test_without_targets_a_step_may_take_any_time() -> None:
    assert limits([]) == (INFINITE, INFINITE)


def test_a_step_keeps_the_tightest_token_target_with_a_margin() -> None:
    assert limits([1.0], tpot=0.05) == (0.045, 0.075)


def test_a_decode_with_less_time_left_makes_the_step_shorter_but_not_without_end() -> None:
    assert limits([1.0, 0.03], tpot=0.05) == (0.03, 0.03)
    assert limits([-1.0], tpot=0.05) == (0.025, 0.025)


def test_a_tight_ttft_target_bounds_the_wait_for_a_steps_end() -> None:
    assert limits([], ttft=0.4) == (0.1, 0.1)
    assert limits([1.0], tpot=0.05, ttft=0.12) == (0.03, 0.045)
