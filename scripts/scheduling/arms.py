"""The ways of scheduling that are compared, and one run of one of them in virtual time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from app.engine.scheduler import DeadlineScheduler
from app.engine.step_cost import CostProfile
from scripts.scheduling.figures import Outcome, Run
from scripts.scheduling.virtual_engine import BLOCK, Seen, VirtualEngine
from scripts.scheduling.workload import Mix, Offer, closed_loops, draw, first_alone, most_prompt_tokens, open_offers

MAX_MODEL_LEN = 131_072
# What "tuned" tries.
THRESHOLDS = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Arm:
    """A way of scheduling. `engine`: arguments of VirtualEngine; `first_class_only`: without the other classes' load;
    `scheduler_cls`: None for vLLM's own."""

    title: str
    scheduler_cls: Any = None
    engine: dict[str, Any] = field(default_factory=dict)
    first_class_only: bool = False


def threshold_arm(tokens: int) -> Arm:
    """vLLM's priority with prompts cut into chunks of at most so many tokens."""
    return Arm(
        f"vLLM priority, threshold {tokens}", engine={"policy": "priority", "long_prefill_token_threshold": tokens}
    )


FCFS, PRIORITY, DEADLINE, ALONE = "fcfs", "priority", "deadline", "alone"
ARMS = {
    FCFS: Arm("FCFS"),
    PRIORITY: Arm("vLLM priority", engine={"policy": "priority"}),
    DEADLINE: Arm("deadline", scheduler_cls=DeadlineScheduler),
    ALONE: Arm("first class alone", first_class_only=True),
}


@dataclass(frozen=True)
class Setting:
    """What all arms share. `seconds`: how long requests come."""

    profile: CostProfile
    mix: Mix
    seconds: float
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = MAX_MODEL_LEN
    is_asynchronous: bool = True


def run_virtual(arm: Arm, setting: Setting, seed: int) -> Run:
    """One arm, from the first request until the last of those that came in time has ended."""
    mix = first_alone(setting.mix) if arm.first_class_only else setting.mix
    engine = VirtualEngine(
        arm.scheduler_cls,
        blocks=setting.profile.kv_capacity_tokens // BLOCK,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_model_len=setting.max_model_len,
        is_asynchronous=setting.is_asynchronous,
        profile=setting.profile,
        **arm.engine,
    )
    return _Replay(engine, mix, setting, seed).run()


class _Replay:
    """Offers requests to an engine as virtual time passes."""

    def __init__(self, engine: VirtualEngine, mix: Mix, setting: Setting, seed: int) -> None:
        self._engine = engine
        self._mix = mix
        self._seconds = setting.seconds
        self._start = engine.clock()
        self._open = open_offers(mix, setting.seconds, seed, most_prompt_tokens(setting.max_model_len))
        self._closed = closed_loops(mix, seed)
        self._ranks = {name: rank for rank, name in enumerate(mix)}
        self._sent: dict[str, tuple[Offer, Seen]] = {}
        self._numbers = itertools.count()

    def run(self) -> Run:
        """Until nothing that came in time is left."""
        engine, pending = self._engine, list(reversed(self._open))
        closed = [self._draw(name, 0.0) for name, load in self._mix.items() for _ in range(load.concurrency or 0)]
        for offer in closed:
            self._send(offer)
        watched = {name for name, (offer, _) in self._sent.items() if offer.service_class in self._closed}
        busy_in_time = 0.0
        while True:
            while pending and self._start + pending[-1].at <= engine.clock():
                self._send(pending.pop())
            if engine.clock() < self._start + self._seconds:
                busy_in_time = engine.busy_s
            elif not pending and all(
                seen.finished is not None
                for offer, seen in self._sent.values()
                if offer.service_class not in self._closed
            ):
                break
            if not engine.step():
                engine.clock.now = max(engine.clock(), self._start + (pending[-1].at if pending else self._seconds))
            for name in [name for name in watched if self._sent[name][1].finished is not None]:
                watched.remove(name)
                offer = self._draw(self._sent[name][0].service_class, engine.clock() - self._start)
                watched.add(self._send(offer))
        return self._result(busy_in_time)

    def _draw(self, name: str, at: float) -> Offer:
        return draw(name, self._mix[name], at, self._closed[name])

    def _send(self, offer: Offer) -> str:
        number = next(self._numbers)
        # Token ids that no other prompt begins with, after those that the class shares.
        prompt = [self._ranks[offer.service_class]] * offer.shared + [number + 10] * (
            offer.prompt_tokens - offer.shared
        )
        name = str(number)
        seen = self._engine.add(
            name,
            prompt,
            offer.output_tokens,
            offer.targets,
            # Classes by importance, as somebody who has only vLLM's priorities gives them. The deadline scheduler
            # works deadlines out.
            priority=0 if isinstance(self._engine.scheduler, DeadlineScheduler) else self._ranks[offer.service_class],
            arrived=self._start + offer.at,
        )
        self._sent[name] = (offer, seen)
        return name

    def _result(self, busy_s: float) -> Run:
        outcomes = [
            Outcome(
                offer=offer,
                first_token=seen.tokens[0][1] - self._start if seen.tokens else None,
                last_token=seen.tokens[-1][1] - self._start if seen.finished is not None else None,
                tokens_in_time=sum(at - self._start < self._seconds for _, at in seen.tokens),
                wasted_tokens=seen.recomputed,
                preemptions=seen.request.num_preemptions,
            )
            for offer, seen in self._sent.values()
        ]
        times = getattr(self._engine.scheduler, "times", None)
        return Run(
            seconds=self._seconds,
            outcomes=outcomes,
            busy_share=busy_s / self._seconds,
            model_error_p90=None if times is None else times.error_p90,
        )
