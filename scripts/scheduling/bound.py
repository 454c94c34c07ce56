"""How much goodput is possible at all: an upper bound for any scheduler, also for one that knows the future. Pure.

Every request is taken to need only what no batching can save it: its tokens' share of the linear layers at the GPU's
full efficiency, the attention of its prompt, and for each token of its answer the read of its KV cache. Reading the
weights, launching and rounding to steps cost nothing here, work can be divided at will, and tokens need not come one
after the other. A request counts by the share of it that is done in time, between its arrival and its deadline.

That is a linear program: shares x_j of works p_j, so that the work of each set of requests fits into the time that they
have. The works x_j p_j that are possible form a polymatroid, so giving each request, the one with the least work first,
as much as still fits reaches the maximum (Edmonds 1970).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.engine.step_cost import CostProfile
from scripts.scheduling.workload import Offer

_PRECISION = 1e-3


@dataclass(frozen=True, slots=True)
class Job:
    """`work`: seconds of the GPU, to be done between `release` and `deadline`."""

    release: float
    deadline: float
    work: float


def prefill_work(profile: CostProfile, offer: Offer) -> float:
    """Seconds of the GPU that a prompt needs at least."""
    prompt = offer.prompt_tokens - offer.shared
    linear = 2 * profile.linear_parameters * prompt / (profile.gemm_efficiency * profile.flops)
    pairs = prompt * offer.shared + prompt**2 / 2
    attention = 4 * profile.attention_width * profile.layers * pairs / (profile.attention_efficiency * profile.flops)
    return linear + attention


def decode_work(profile: CostProfile, offer: Offer) -> float:
    """Seconds of the GPU that the answer after its first token needs at least."""
    steps = max(0, offer.output_tokens - 1)
    parameters = profile.linear_parameters + profile.lm_head_parameters
    per_token = 2 * parameters / (profile.gemm_efficiency * profile.flops) + profile.seconds_per_sequence
    context = steps * offer.prompt_tokens + steps**2 / 2
    return steps * per_token + profile.kv_bytes_per_token * context / (profile.kv_read_efficiency * profile.bandwidth)


def most_in_time(jobs: Sequence[Job]) -> float:
    """How many jobs can be done in time, parts of them counted as parts."""
    taken: list[Job] = []
    total = 0.0
    for job in sorted(jobs, key=lambda one: one.work):
        if _fits([*taken, job]):
            taken.append(job)
            total += 1
            continue
        low, high = 0.0, 1.0
        while high - low > _PRECISION:
            middle = (low + high) / 2
            part = Job(job.release, job.deadline, job.work * middle)
            low, high = (middle, high) if _fits([*taken, part]) else (low, middle)
        taken.append(Job(job.release, job.deadline, job.work * low))
        # Rounded up, so that it stays an upper bound.
        total += high
    return total


def goodput_bound(profile: CostProfile, offers: Iterable[Offer], seconds: float) -> float:
    """Requests per second with targets that can meet them at best."""
    first, whole = [], []
    for offer in offers:
        if offer.targets is None:
            continue
        prefill, decode = prefill_work(profile, offer), decode_work(profile, offer)
        ttft, tpot = offer.targets.ttft_s, offer.targets.tpot_s
        if ttft is not None:
            first.append(Job(offer.at, offer.at + ttft, prefill))
        if ttft is not None and tpot is not None:
            end = offer.at + ttft + tpot * max(0, offer.output_tokens - 1)
            whole.append(Job(offer.at, end, prefill + decode))
    counts = [most_in_time(jobs) for jobs in (first, whole) if jobs]
    return min(counts, default=0.0) / seconds


def _fits(jobs: Sequence[Job]) -> bool:
    """Whether all can be done in time: earliest deadline first does it if anything does."""
    ordered = sorted(jobs, key=lambda job: job.release)
    ready: list[tuple[float, float]] = []
    now, index = 0.0, 0
    while ready or index < len(ordered):
        if not ready:
            now = max(now, ordered[index].release)
        while index < len(ordered) and ordered[index].release <= now:
            heapq.heappush(ready, (ordered[index].deadline, ordered[index].work))
            index += 1
        deadline, work = heapq.heappop(ready)
        until = ordered[index].release if index < len(ordered) else float("inf")
        done = min(work, until - now)
        now += done
        if done < work:
            heapq.heappush(ready, (deadline, work - done))
        elif now > deadline + 1e-9:
            return False
    return True
