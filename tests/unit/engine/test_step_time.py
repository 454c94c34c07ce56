"""The step-time model against cost models of real GPUs, and against what real machines do besides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.step_cost import PROFILES, CostProfile, step_seconds
from app.engine.step_time import StepTimeModel, StepWork

H100 = PROFILES["h100-llama-3.1-8b"]


def steps(profile: CostProfile, seed: int) -> Iterator[tuple[StepWork, float]]:
    """A load that comes and goes: decodes of changing number and context, prompts of all lengths in chunks."""
    random_ = random.Random(seed)
    decodes, depth, left = 0, 0, 0
    mean_context = 800
    while True:
        decodes = min(256, max(0, decodes + random_.randint(-4, 4)))
        mean_context = min(20_000, max(50, mean_context + random_.randint(-200, 200)))
        if not left and random_.random() < 0.4:
            depth, left = 0, random_.choice([60, 300, 1500, 12_000, 48_000])
        chunk = min(left, random_.choice([256, 512, 2048]), 8192)
        prefills = [(chunk, depth)] if chunk else []
        work = StepWork(
            decodes, decodes, decodes * mean_context, chunk, chunk * depth + chunk * chunk / 2, len(prefills)
        )
        depth, left = depth + chunk, left - chunk
        if decodes or chunk:
            yield work, step_seconds(profile, decodes, decodes * mean_context, prefills, chunk > 0 and not left)


def taught(seconds_of: Callable[[StepWork, float], float], number: int, seed: int = 0) -> StepTimeModel:
    """A model that has seen so many steps, each as long as `seconds_of(work, cost model's seconds)` says."""
    model = StepTimeModel()
    for (work, seconds), _ in zip(steps(H100, seed), range(number), strict=False):
        model.observe(work, seconds_of(work, seconds))
    return model


def error_p90(model: StepTimeModel, seed: int, scale: float = 1.0, profile: CostProfile = H100) -> float:
    """Over 300 steps that it has not seen."""
    errors = sorted(
        abs(model.seconds(work) / (seconds * scale) - 1)
        for (work, seconds), _ in zip(steps(profile, seed), range(300), strict=False)
    )
    return errors[270]


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("seed", range(4))
def test_after_300_steps_from_nothing_it_knows_a_gpu(name: str, seed: int) -> None:
    model = StepTimeModel()
    for (work, seconds), _ in zip(steps(PROFILES[name], seed), range(300), strict=False):
        model.observe(work, seconds)
    assert error_p90(model, seed + 100, profile=PROFILES[name]) <= 0.15
    assert model.error_p90 <= 0.15
    assert model.error_p50 <= model.error_p90
    assert model.steps == 300


def test_noise_and_pauses_do_not_lead_it_astray() -> None:
    random_ = random.Random(1)

    def disturbed(work: StepWork, seconds: float) -> float:
        seconds *= random_.lognormvariate(0, 0.08)
        return seconds + 0.5 if random_.random() < 0.02 else seconds

    assert error_p90(taught(disturbed, 400), 100) <= 0.15


def test_it_follows_a_gpu_that_becomes_slower() -> None:
    """For example one that gets too hot."""
    model = taught(lambda _, seconds: seconds, 1000)
    for (work, seconds), _ in zip(steps(H100, 5), range(50), strict=False):
        model.observe(work, seconds * 1.5)
    assert error_p90(model, 100, scale=1.5) <= 0.2
    for (work, seconds), _ in zip(steps(H100, 6), range(1500), strict=False):
        model.observe(work, seconds * 1.5)
    assert error_p90(model, 101, scale=1.5) <= 0.15


def test_before_it_knows_anything_steps_are_kept_small_and_grow_with_what_was_seen() -> None:
    model = StepTimeModel()
    assert model.seconds(StepWork(prefill_tokens=1000)) == 0.0
    assert math.isnan(model.error_p90)
    assert model.cautious_tokens() == 256
    model.observe(StepWork(prefill_tokens=200, prefills=1), 0.01)
    assert model.cautious_tokens() == 400
    model.observe(StepWork(prefill_tokens=400, prefills=1), 0.012)
    assert model.cautious_tokens() == 800


def test_after_a_few_decode_steps_a_prefill_is_not_thought_to_be_free() -> None:
    model = StepTimeModel()
    for tokens in (100, 256, 300, 280):
        model.observe(StepWork(prefill_tokens=tokens, prefills=1), 0.005 + tokens * 20e-6)
    assert model.seconds(StepWork(prefill_tokens=2000, prefills=1)) >= 0.5 * (0.005 + 2000 * 20e-6)


def test_what_cannot_be_a_step_is_passed_over() -> None:
    model = StepTimeModel()
    for work, seconds in [(StepWork(), 0.1), (StepWork(decodes=1, decode_tokens=1), 0.0)]:
        model.observe(work, seconds)
    model.observe(StepWork(decodes=1, decode_tokens=1), -1.0)
    model.observe(StepWork(decodes=1, decode_tokens=1), math.inf)
    assert model.steps == 0


WORK = st.builds(
    StepWork,
    decodes=st.integers(0, 300),
    decode_tokens=st.integers(0, 600),
    decode_context_tokens=st.integers(0, 400_000),
    prefill_tokens=st.integers(0, 16_384),
    attended_tokens=st.floats(0, 1e9),
    prefills=st.integers(0, 20),
)


@settings(max_examples=60, deadline=None)
@given(
    seen=st.lists(st.tuples(WORK, st.floats(1e-6, 10)), max_size=60),
    work=WORK,
    more=st.integers(0, 5000),
    depth=st.integers(0, 100_000),
    seconds=st.floats(0, 1),
)
def test_whatever_it_saw_more_work_takes_no_less_and_what_fits_fits(
    seen: list[tuple[StepWork, float]], work: StepWork, more: int, depth: int, seconds: float
) -> None:
    model = StepTimeModel()
    for observed, took in seen:
        model.observe(observed, took)

    def with_chunk(tokens: int) -> StepWork:
        return StepWork(
            work.decodes,
            work.decode_tokens,
            work.decode_context_tokens,
            work.prefill_tokens + tokens,
            work.attended_tokens + tokens * (depth + tokens / 2),
            work.prefills + 1,
        )

    assert 0 <= model.seconds(work) < math.inf
    assert model.seconds(work) <= model.seconds(with_chunk(more)) * (1 + 1e-9)
    fitting = model.prefill_tokens_within(work, seconds, depth, more)
    assert 0 <= fitting <= more
    if fitting:
        assert model.seconds(with_chunk(fitting)) <= seconds * (1 + 1e-9)
    if fitting < more:
        assert model.seconds(with_chunk(fitting + 1)) >= seconds * (1 - 1e-9)
