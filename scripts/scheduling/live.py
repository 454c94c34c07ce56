"""One arm in real time, on vLLM's whole engine: on the CPU with a real model, or on the simulated GPU.

Run as a process of its own per arm, so that none inherits another's memory and threads: reads a job as JSON from
standard input and writes the outcomes as JSON to standard output.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from app.config import CpuExecutor, SimulatedExecutorConfig
from app.engine.targets import Targets, to_extra_args
from scripts.scheduling.figures import Outcome, Run
from scripts.scheduling.workload import Mix, Offer, closed_loops, draw, most_prompt_tokens, open_offers, parse_mix

_ROOT = Path(__file__).resolve().parents[2]
_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Job:
    """What the process is told. `kind`: `cpu` or `simulated`; `engine`: arguments of vLLM; `mix`: as JSON."""

    kind: str
    profile: str
    is_deadline: bool
    engine: dict[str, Any]
    mix: dict[str, Any]
    seconds: float
    seed: int


def run_live(job: Job) -> Run:
    """One run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.scheduling.live"],
        cwd=_ROOT,
        input=json.dumps(asdict(job)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    outcomes = []
    for raw in result["outcomes"]:
        offer = raw.pop("offer")
        targets = offer.pop("targets")
        outcomes.append(Outcome(Offer(**offer, targets=Targets(**targets) if targets else None), **raw))
    return Run(seconds=job.seconds, outcomes=outcomes, model_error_p90=result["model_error_p90"])


class _Load:
    """Offers requests to an AsyncLLM."""

    def __init__(self, engine: Any, job: Job, mix: Mix) -> None:
        self._engine = engine
        self._job = job
        self._mix = mix
        self._ranks = {name: rank for rank, name in enumerate(mix)}
        self._numbers = itertools.count()
        self._start = 0.0
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Until nothing that came in time is left."""
        job = self._job
        offers = open_offers(self._mix, job.seconds, job.seed, most_prompt_tokens(job.engine["max_model_len"]))
        self._start = time.monotonic()
        loops = [
            asyncio.create_task(self._loop(name, random_))
            for name, random_ in closed_loops(self._mix, job.seed).items()
            for _ in range(self._mix[name].concurrency or 0)
        ]
        tasks = []
        for offer in offers:
            await asyncio.sleep(self._start + offer.at - time.monotonic())
            tasks.append(asyncio.create_task(self.send(offer)))
        await asyncio.gather(*tasks)
        await asyncio.sleep(self._start + job.seconds - time.monotonic())
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def _loop(self, name: str, random_: random.Random) -> None:
        while True:
            await self.send(draw(name, self._mix[name], time.monotonic() - self._start, random_))

    async def send(self, offer: Offer) -> None:
        """One request, until its end."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        number = next(self._numbers)
        params = SamplingParams(
            max_tokens=offer.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
            extra_args=to_extra_args(offer.targets) if offer.targets else None,
        )
        prompt = [1000 + self._ranks[offer.service_class]] * offer.shared
        prompt += [2000 + number % 40_000] * (offer.prompt_tokens - offer.shared)
        first: float | None = None
        last: float | None = None
        in_time = 0
        try:
            async for output in self._engine.generate(
                tokens_input(prompt),
                params,
                str(number),
                priority=0 if self._job.is_deadline else self._ranks[offer.service_class],
            ):
                now = time.monotonic() - self._start
                first = now if first is None else first
                in_time += len(output.outputs[0].token_ids) if now < self._job.seconds else 0
            last = now
        finally:
            self.outcomes.append(Outcome(offer, first, last, in_time))


def _engine_args(job: Job) -> Any:
    from vllm import AsyncEngineArgs

    from app.engine.arguments import DEADLINE_SCHEDULER
    from app.engine.simulated import simulated_engine_args
    from app.model_cache import builtin_model_path

    args: dict[str, Any] = {"model": str(builtin_model_path(_MODEL)), "disable_log_stats": False, **job.engine}
    if job.kind == "simulated":
        args.update(simulated_engine_args(job.profile, 1.0))
    else:
        args.update(distributed_executor_backend="uni", enforce_eager=True)
    if job.is_deadline:
        args["scheduler_cls"] = DEADLINE_SCHEDULER
    return AsyncEngineArgs(**args)


async def _serve(job: Job) -> dict[str, Any]:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    from app.engine.counters import Reader

    errors: list[float] = []

    class Watch(StatLoggerBase):
        """Keeps the step-time model's last error."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._reader = Reader()

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            progress = self._reader.read(scheduler_stats.num_kv_fetch_reqs_by_stage) if scheduler_stats else None
            if progress and "step_time_error_p90" in progress.errors:
                errors.append(progress.errors["step_time_error_p90"])

        def log_engine_initialized(self) -> None:
            pass

    mix = parse_mix(job.mix, "mix")
    engine = AsyncLLM.from_engine_args(_engine_args(job), stat_loggers=[Watch])
    try:
        # What starts up with the first requests is no arm's doing.
        warm = _Load(engine, job, mix)
        offers = [Offer(0.0, next(iter(mix)), 256, 20, None) for _ in range(4)]
        await asyncio.wait_for(asyncio.gather(*map(warm.send, offers)), timeout=120)
        load = _Load(engine, job, mix)
        await load.run()
    finally:
        engine.shutdown()
    return {"outcomes": [asdict(one) for one in load.outcomes], "model_error_p90": errors[-1] if errors else None}


def main() -> NoReturn:
    """Serve one job."""
    from app.engine.environment import prepare_engine_process

    job = Job(**json.loads(sys.stdin.read()))
    out, sys.stdout = sys.stdout, sys.stderr
    executor = CpuExecutor(kind="cpu", threads=1) if job.kind == "cpu" else SimulatedExecutorConfig(kind="simulated")
    prepare_engine_process(executor)
    result = asyncio.run(_serve(job))
    print(json.dumps(result), file=out, flush=True)
    # vLLM's destructors complain when the interpreter goes before them.
    os._exit(0)


if __name__ == "__main__":
    main()
