"""The deadline scheduler: vLLM's real one underneath, a fake model and virtual time around it."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.engine.scheduler import AsyncDeadlineScheduler, DeadlineScheduler
from app.engine.targets import Targets
from tests.support.virtual_engine import CheckedEngine

INTERACTIVE = Targets(ttft_s=0.5, tpot_s=0.05, service_class="interactive")
LONG = Targets(ttft_s=10.0, service_class="long")

requests = st.fixed_dictionaries(
    {
        "gap": st.sampled_from([0.0, 0.001, 0.02, 0.2]),
        "prompt": st.one_of(st.integers(1, 64), st.integers(65, 1500)),
        "output": st.integers(1, 40),
        "targets": st.sampled_from([None, INTERACTIVE, LONG, Targets(tpot_s=0.02), Targets(ttft_s=0.001)]),
        "priority": st.sampled_from([0, 0, 0, -2, 5]),
        "lora": st.sampled_from([0, 0, 1, 2, 3]),
        "shares_prefix": st.booleans(),
        "leaves_after": st.sampled_from([None, None, None, 0.0, 0.01, 0.1]),
    }
)
engines = st.fixed_dictionaries(
    {
        "is_asynchronous": st.booleans(),
        # From "the longest request barely fits" to plenty.
        "blocks": st.sampled_from([100, 140, 2048]),
        "max_num_seqs": st.sampled_from([1, 3, 32]),
        "prefix_caching": st.booleans(),
        "max_loras": st.sampled_from([0, 0, 2]),
        "seed": st.integers(0, 3),
    }
)
shapes = st.sampled_from(
    [
        {"max_num_batched_tokens": 2048},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 2048, "chunked_prefill": False},
        {"max_num_batched_tokens": 512, "drafts": 3},
    ]
)


def serve(engine: CheckedEngine, load: list[dict[str, Any]]) -> None:
    """Give the engine the requests as time passes, and let it finish."""
    leaving: list[tuple[float, str]] = []
    for index, spec in enumerate(load):
        engine.run(spec["gap"])
        for when, name in list(leaving):
            if when <= engine.clock():
                engine.abort(name)
                leaving.remove((when, name))
        prompt: int | list[int] = spec["prompt"]
        if spec["shares_prefix"]:
            prompt = [9] * spec["prompt"]
        name = f"r{index}"
        lora = spec["lora"] if engine.config.lora_config else 0
        engine.add(name, prompt, spec["output"], spec["targets"], spec["priority"], lora)
        if spec["leaves_after"] is not None:
            leaving.append((engine.clock() + spec["leaves_after"], name))
    for _, name in leaving:
        engine.abort(name)
    engine.run()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine=engines, shape=shapes, load=st.lists(requests, min_size=1, max_size=25))
def test_whatever_comes_is_served_once_and_leaves_nothing(
    engine: dict[str, Any], shape: dict[str, Any], load: list[dict[str, Any]]
) -> None:
    """The driver checks every step: see CheckedEngine."""
    if shape.get("drafts") and engine["is_asynchronous"]:
        shape = {**shape, "drafts": 0}
    subject = CheckedEngine(DeadlineScheduler, **engine, **shape)
    serve(subject, load)
    subject.check_all_is_returned()
    assert not subject.scheduler._tracks
    assert not subject.scheduler._tight
    assert not subject.scheduler._lost
    assert subject.scheduler._with_target == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine=engines, shape=shapes, load=st.lists(requests, min_size=1, max_size=25))
def test_without_targets_it_is_vllms_fcfs_token_for_token(
    engine: dict[str, Any], shape: dict[str, Any], load: list[dict[str, Any]]
) -> None:
    if shape.get("drafts") and engine["is_asynchronous"]:
        shape = {**shape, "drafts": 0}
    plain = [{**spec, "targets": None, "priority": 0} for spec in load]
    ours, theirs = (CheckedEngine(cls, **engine, **shape) for cls in (DeadlineScheduler, None))
    serve(ours, plain)
    serve(theirs, plain)
    assert ours.steps == theirs.steps
    assert {name: seen.tokens for name, seen in ours.seen.items()} == {
        name: seen.tokens for name, seen in theirs.seen.items()
    }


def test_asynchronous_scheduling_gets_its_own_variant() -> None:
    assert type(CheckedEngine().scheduler) is DeadlineScheduler
    assert type(CheckedEngine(is_asynchronous=True).scheduler) is AsyncDeadlineScheduler
