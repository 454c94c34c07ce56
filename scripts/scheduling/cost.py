"""What planning costs: CPU time of `schedule()`, the deadline scheduler's against vLLM's own."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from app.engine.scheduler import AsyncDeadlineScheduler
from app.engine.targets import Targets
from scripts.scheduling.virtual_engine import VirtualEngine

RUNNING, WAITING = 256, 500
_STEPS = 50
_TARGETS = (Targets(0.5, 0.05, "interactive"), Targets(5.0, 0.1, "standard"), None)


def schedule_cost(rounds: int = 8) -> dict[str, float]:
    """Medians over rounds in turn, with 256 requests running and 500 waiting.

    `vllm_us`, `deadline_us`: microseconds per call; `plan_us`: what the deadline scheduler adds to vLLM's part of the
    same call; `plan_share`: that, divided by vLLM's part.
    """
    engines = {"vLLM priority": _engine(_TimedScheduler), "deadline": _engine(_TimedDeadlineScheduler)}
    for number in range(rounds + 1):
        for engine in engines.values():
            for _ in range(_STEPS):
                engine.step()
        if not number:
            # The first round fills caches and takes slots.
            for engine in engines.values():
                engine.scheduler.vllm_times.clear()
            engines["deadline"].scheduler.whole_times.clear()
    alone, below = (engine.scheduler.vllm_times for engine in engines.values())
    whole = engines["deadline"].scheduler.whole_times
    plan = statistics.median(both - part for both, part in zip(whole, below, strict=True))
    return {
        "vllm_us": statistics.median(alone) * 1e6,
        "deadline_us": statistics.median(whole) * 1e6,
        "plan_us": plan * 1e6,
        "plan_share": plan / statistics.median(below),
    }


class _TimedScheduler(AsyncScheduler):
    """vLLM's own, with the seconds that its calls took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.vllm_times: list[float] = []
        super().__init__(*args, **kwargs)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's part."""
        begin = time.perf_counter()
        output = super().schedule(throttle_prefills)
        self.vllm_times.append(time.perf_counter() - begin)
        return output


class _TimedDeadlineScheduler(AsyncDeadlineScheduler, _TimedScheduler):
    """Ours on top of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.whole_times: list[float] = []
        super().__init__(*args, **kwargs)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Both parts."""
        begin = time.perf_counter()
        output = super().schedule(throttle_prefills)
        self.whole_times.append(time.perf_counter() - begin)
        return output


def _engine(scheduler_cls: Any) -> VirtualEngine:
    engine = VirtualEngine(
        scheduler_cls,
        is_asynchronous=True,
        blocks=200_000,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=8192,
        max_model_len=131_072,
        policy="priority",
    )
    random_ = random.Random(0)
    for index in range(RUNNING):
        engine.add(f"running{index}", 200, 50_000, Targets(None, 0.2, "standard") if index % 2 else None)
    while not all(seen.tokens for seen in engine.seen.values()):
        engine.step()
    for index in range(WAITING):
        engine.add(
            f"waiting{index}",
            random_.randint(200, 4000),
            50,
            _TARGETS[index % 3],
            index % 3 if scheduler_cls is _TimedScheduler else 0,
        )
    return engine
