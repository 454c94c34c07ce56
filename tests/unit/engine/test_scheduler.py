"""The deadline scheduler: vLLM's real one underneath, a fake model and virtual time around it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState

from app.engine.counters import Reader
from app.engine.scheduler import AsyncDeadlineScheduler, DeadlineScheduler, read_settings
from app.engine.step_plan import LATE_TURN, MIN_CHUNK_TOKENS
from app.engine.targets import Targets
from app.errors import ConfigError
from app.routing.replicas import at_edge, until
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
    subject = CheckedEngine(DeadlineScheduler, **engine, **shape)
    serve(subject, load)
    subject.check_all_is_returned()
    assert not subject.scheduler._tracks
    assert not subject.scheduler._tight
    assert not subject.scheduler._lost
    assert subject.scheduler._with_target == 0
    assert subject.scheduler.counters.wasted_tokens <= sum(seen.recomputed for seen in subject.seen.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine=engines, shape=shapes, load=st.lists(requests, min_size=1, max_size=25))
def test_without_targets_it_is_vllms_fcfs_token_for_token(
    engine: dict[str, Any], shape: dict[str, Any], load: list[dict[str, Any]]
) -> None:
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


BATCH_OUTPUT = 400


def busy_with_batch(engine: CheckedEngine, number: int, prompt: int = 200) -> None:
    """Requests without targets, all running and well into their answers."""
    for index in range(number):
        engine.add(f"batch{index}", prompt, BATCH_OUTPUT)
    engine.run(0.4)
    assert len(engine.scheduler.running) == number


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_running_long_prefill_yields_to_an_urgent_arrival_and_goes_on_after_it(is_asynchronous: bool) -> None:
    engine = CheckedEngine(is_asynchronous=is_asynchronous, max_num_batched_tokens=512)
    engine.add("long", 8000, 5, LONG)
    while len(engine.steps) < 3:
        engine.step()
    engine.add("urgent", 512, 5, INTERACTIVE)
    before = len(engine.steps)
    engine.run()
    assert engine.steps[before] == {"urgent": 512}
    assert engine.steps[before + 1]["long"] > 0
    assert engine.scheduler.counters.yielded_prefills >= 1
    engine.check_all_is_returned()


def test_a_deadline_takes_a_slot_from_who_has_no_target() -> None:
    engine = CheckedEngine(max_num_seqs=2, settings={"max_wasted_share": 1.0})
    busy_with_batch(engine, 2)
    urgent = engine.add("urgent", 100, 5, INTERACTIVE)
    engine.run()
    engine.check_all_is_returned()
    assert urgent.ttft <= 0.5
    counters = engine.scheduler.counters
    assert counters.slot_preemptions == 1
    assert counters.kv_preemptions == 0
    preempted = [seen for seen in engine.seen.values() if seen.request.num_preemptions]
    assert len(preempted) == 1
    # What it had computed was in the prefix cache when it came back, but for the block that was not full.
    assert counters.wasted_tokens == preempted[0].recomputed <= 16


def test_a_deadline_takes_kv_blocks() -> None:
    engine = CheckedEngine(blocks=130, prefix_caching=False, settings={"max_wasted_share": 1.0})
    busy_with_batch(engine, 4, prompt=400)
    urgent = engine.add("urgent", 800, 5, INTERACTIVE)
    engine.run()
    engine.check_all_is_returned()
    assert urgent.ttft <= 0.5
    assert engine.scheduler.counters.kv_preemptions >= 1
    assert engine.scheduler.counters.wasted_tokens == sum(seen.recomputed for seen in engine.seen.values()) > 0


def test_no_more_work_is_thrown_away_than_the_settings_allow() -> None:
    engine = CheckedEngine(max_num_seqs=2, prefix_caching=False, settings={"max_wasted_share": 0.0})
    busy_with_batch(engine, 2)
    engine.add("urgent", 100, 5, INTERACTIVE)
    engine.run()
    engine.check_all_is_returned()
    assert engine.scheduler.counters.slot_preemptions == engine.scheduler.counters.wasted_tokens == 0


def test_who_came_back_keeps_its_slot_for_a_while() -> None:
    """However many urgent ones come."""
    engine = CheckedEngine(max_num_seqs=1, settings={"max_wasted_share": 1.0, "min_residence_ms": 500})
    engine.add("batch", 200, BATCH_OUTPUT)
    for index in range(40):
        engine.run(0.1)
        engine.add(f"urgent{index}", 50, 2, INTERACTIVE)
    engine.run()
    engine.check_all_is_returned()
    seen = engine.seen["batch"]
    assert seen.finished is not None
    # It runs for half a second at least before the next one takes its slot.
    assert 1 <= seen.request.num_preemptions <= (seen.finished - seen.arrived) / 0.5


def test_who_has_no_target_ends_however_many_urgent_ones_come() -> None:
    """The bound: after its patience it comes first in one step of LATE_TURN, with MIN_CHUNK_TOKENS at least."""
    engine = CheckedEngine(max_num_batched_tokens=512, settings={"patience_ms": 1000})
    batch = engine.add("batch", 2000, 5)
    longest_step = 0.0
    # More than the engine can do.
    for index in range(400):
        begin, steps = engine.clock(), len(engine.steps)
        engine.add(f"urgent{index}", 500, 2, Targets(ttft_s=1000.0))
        engine.run(0.01)
        longest_step = max(longest_step, (engine.clock() - begin) / max(1, len(engine.steps) - steps))
        if batch.tokens:
            break
    assert batch.tokens, "it starves"
    assert batch.ttft <= 1.0 + LATE_TURN * math.ceil(2000 / MIN_CHUNK_TOKENS) * longest_step


def test_decodes_without_a_target_skip_steps_so_that_others_keep_theirs() -> None:
    engine = CheckedEngine(blocks=40_000, max_num_seqs=64, max_model_len=131_072, max_num_batched_tokens=8192)
    for index in range(24):
        # 24 contexts of 24,000 tokens: a step with all of them takes 36 ms.
        engine.add(f"batch{index}", 24_000, 600)
    while not all(seen.tokens for seen in engine.seen.values()):
        engine.step()
    tight = engine.add("tight", 100, 60, Targets(ttft_s=1.0, tpot_s=0.02, service_class="interactive"))
    engine.run()
    engine.check_all_is_returned()
    assert engine.scheduler.counters.held_decodes > 0
    assert tight.tpot <= 0.022


def test_misses_are_counted_by_class() -> None:
    engine = CheckedEngine()
    engine.add("late", 8000, 5, Targets(ttft_s=0.001, tpot_s=0.0001, service_class="interactive"))
    engine.add("in time", 100, 5, LONG)
    engine.run()
    counters = engine.scheduler.counters
    assert counters.predicted_ttft_misses == counters.ttft_misses == counters.tpot_misses == {"interactive": 1}


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_miss_is_counted_of_a_request_that_ends_with_its_first_token(is_asynchronous: bool) -> None:
    engine = CheckedEngine(is_asynchronous=is_asynchronous)
    engine.add("late", 8000, 1, Targets(ttft_s=0.001, service_class="agents"))
    engine.run()
    assert engine.scheduler.counters.ttft_misses == {"agents": 1}


def test_requests_without_targets_of_their_own_have_the_settings() -> None:
    engine = CheckedEngine(settings={"default_ttft_ms": 300, "default_tpot_ms": 20})
    engine.add("long", 8000, 5, LONG)
    engine.step()
    plain = engine.add("plain", 100, 5)
    engine.run()
    assert plain.ttft <= 0.3
    assert plain.tpot <= 0.022


def test_smaller_priorities_go_before_larger_ones() -> None:
    engine = CheckedEngine(max_num_batched_tokens=256)
    engine.add("first", 600, 1, INTERACTIVE)
    engine.add("less", 600, 1, INTERACTIVE, priority=3)
    engine.add("more", 600, 1, INTERACTIVE, priority=-3)
    engine.run()
    ends = sorted(engine.seen, key=lambda name: engine.seen[name].finished or 0.0)
    assert ends.index("more") < ends.index("less")


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_engine_admits_nobody_until_it_goes_on(state: PauseState, is_asynchronous: bool) -> None:
    engine = CheckedEngine(is_asynchronous=is_asynchronous)
    engine.add("running", 3000, 50, LONG)
    engine.run(0.2)
    engine.scheduler.set_pause_state(state)
    urgent = engine.add("urgent", 100, 5, INTERACTIVE)
    for _ in range(20):
        engine.step()
    assert not urgent.tokens
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    engine.check_all_is_returned()


def test_the_counters_are_in_the_statistics() -> None:
    engine = CheckedEngine()
    engine.add("late", 3000, 5, Targets(ttft_s=0.001, service_class="interactive"))
    engine.run()
    engine.clock.now += 1
    progress = Reader().read(engine.scheduler.make_stats().num_kv_fetch_reqs_by_stage)
    assert progress is not None
    assert progress.counts["ttft_misses", "interactive"] == 1
    assert progress.counts["steps", None] == len(engine.steps)
    assert set(progress.errors) == {"step_time_error_p50", "step_time_error_p90"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 1}, "patience"),
        ({"tpot_margin": 2}, "tpot_margin"),
        ({"default_ttft_ms": -1}, "default_ttft_ms"),
        ("fast", "additional_config.sluice_scheduler"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings({"sluice_scheduler": settings})


def test_without_settings_all_have_their_defaults() -> None:
    assert read_settings(None) == read_settings({}) == read_settings({"sluice_scheduler": {}})


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("scheduler_config", "prefill_schedule_interval", 4, "prefill throttling"),
        ("model_config", "runner_type", "pooling", "pooling models"),
        (None, "kv_transfer_config", object(), "KV transfer"),
        (None, "ec_transfer_config", object(), "encoder-cache transfer"),
    ],
)
def test_what_it_cannot_work_with_it_refuses_at_start(section: str | None, key: str, value: Any, message: str) -> None:
    config = copy.deepcopy(CheckedEngine().config)
    # Past vLLM's own checks, which depend on the machine.
    object.__setattr__(getattr(config, section) if section else config, key, value)
    with pytest.raises(ValueError, match=f"does not work with {message}.*leave out scheduler_cls"):
        DeadlineScheduler(config)


def test_the_load_tells_what_there_is_to_do_by_when() -> None:
    engine = CheckedEngine(max_num_batched_tokens=512)
    busy_with_batch(engine, 2)
    engine.add("long", 8000, 5, LONG)
    begun = engine.clock()
    engine.step()
    engine.add("urgent", 200, 5, INTERACTIVE)
    load = engine.scheduler.load(engine.clock())
    assert load.unseen_s == pytest.approx(engine.clock() - begun)
    assert (load.running, load.waiting, load.waiting_promised) == (3, 1, 1)
    assert 7000 < load.prefill_tokens <= 8200
    # The urgent one's work is due within its half second, the long one's within ten.
    early, late = until(load.ahead, 0.7), until(load.ahead, 15.0)
    assert 0 < early < late / 10
    # How far the urgent one could be put off, and the long one.
    assert 0.3 < at_edge(load.slack, 0.4) < 0.5
    assert 5 < at_edge(load.slack, 5.0) < 10
    engine.run()
    engine.check_all_is_returned()
    load = engine.scheduler.load(engine.clock())
    assert (load.running, load.waiting, load.prefill_tokens, load.ahead[-1], load.slack[0]) == (0, 0, 0, 0, math.inf)
    # One of a kind, urgent or long, foretells no other; the two without a target may be followed by a third.
    assert until(load.arriving, 2.0) == 0
    assert 0 < load.arriving[-1] == until(load.arriving, 15.0)
    engine.add("long 2", 8000, 5, LONG)
    engine.add("urgent 2", 200, 5, INTERACTIVE)
    engine.run()
    load = engine.scheduler.load(engine.clock())
    # What it did of late, most of it for who had ten seconds.
    assert 0 < until(load.arriving, 2.0) < 0.5 * load.arriving[-1]


def test_a_prompt_that_needs_most_of_its_time_is_not_protected() -> None:
    engine = CheckedEngine(max_num_batched_tokens=512)
    busy_with_batch(engine, 1)
    long = engine.add("long", 8000, 5, Targets(ttft_s=1000.0))
    needed = engine.scheduler.load(engine.clock()).ahead[-1]
    engine.abort(long.request.request_id)
    for times, is_protected in ((1.5, False), (4.0, True)):
        name = f"again{times}"
        engine.add(name, 8000, 5, Targets(ttft_s=times * needed))
        assert (engine.scheduler.load(engine.clock()).slack[0] < math.inf) is is_protected
        engine.abort(name)


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (1.0, 2)])
def test_the_load_tells_who_would_give_up_a_slot(share: float, number: int) -> None:
    engine = CheckedEngine(max_num_seqs=3, settings={"max_wasted_share": share})
    busy_with_batch(engine, 2)
    engine.add("urgent", 100, 50, INTERACTIVE)
    while not engine.seen["urgent"].tokens:
        engine.step()
    load = engine.scheduler.load(engine.clock())
    assert load.yielding == number
    assert load.yielding_tokens == sum(
        engine.seen[name].request.num_computed_tokens for name in ("batch0", "batch1")[:number]
    )
