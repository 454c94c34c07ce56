"""One engine in this process, without Ray: how it paces a stream, what it tells, and what leaving it does."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from app.config import EngineConfig, ModelConfig, PoolConfig, SimulatedExecutorConfig
from app.engine.environment import prepare_engine_process
from app.telemetry.timeline import read_clock
from app.types import EngineRequest, Head, Tail, Timeline

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

EXECUTOR = SimulatedExecutorConfig(kind="simulated")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Any]:
    prepare_engine_process(EXECUTOR)
    from app.engine.vllm import VLLMEngine

    model = ModelConfig(name="m", source="builtin:smollm2-135m-instruct")
    pool = PoolConfig(executor=EXECUTOR, num_gpus=1, engine=EngineConfig(max_model_len=8192))
    engine = VLLMEngine(model, pool, ray_metrics=False)
    yield engine
    engine.shutdown()
    # While the interpreter still has what its destructor needs.
    del engine
    gc.collect()


def request(**body: Any) -> EngineRequest:
    now = time.monotonic()
    return EngineRequest(
        request_id="r1",
        route="completions",
        body={"model": "m", "ignore_eos": True, **body},
        prompt_token_ids=[[1000, 1001, 1002]],
        service_class="standard",
        service_tier="default",
        pool="p",
        ttft_s=None,
        tpot_s=None,
        timeline=Timeline(received=now, rendered=now, dispatched=now),
        clock=read_clock(),
    )


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  the engine tells nobody
            await asyncio.sleep(0.01)


async def test_what_accumulates_while_the_reader_is_busy_comes_as_one(engine: Any) -> None:
    call = engine.new_call()
    answer = engine.answer(request(prompt="x", max_tokens=40, stream=True), call)
    head = await anext(answer)
    assert isinstance(head, Head)
    assert (head.status, head.final) == (200, False)
    assert head.body.count(b"data: ") == 1
    assert 0 < call.facts().output_tokens < 40

    # The reader is away until the engine has generated everything.
    await until(lambda: call.facts().output_tokens == 40)
    *events, tail = [item async for item in answer]
    assert isinstance(tail, Tail)
    assert not tail.failed
    data = b"".join(event for event in events if isinstance(event, bytes)) + tail.body
    assert data.endswith(b"data: [DONE]\n\n")
    assert data.count(b"data: ") <= 3, "the tokens that waited come merged"
    assert tail.facts.output_tokens == 40
    assert tail.facts.prompt_tokens == 3


async def test_a_reader_that_keeps_up_gets_every_token_at_once(engine: Any) -> None:
    items = [item async for item in engine.answer(request(prompt="x", max_tokens=12, stream=True), engine.new_call())]
    assert len([item for item in items if isinstance(item, bytes)]) >= 10


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}], ids=["plain", "by vLLM's layer"])
async def test_the_end_that_clients_hang_up_at_comes_with_the_facts(engine: Any, more: dict[str, Any]) -> None:
    items = [
        item
        async for item in engine.answer(
            request(prompt="x", max_tokens=12, stream=True, stream_options={"include_usage": True}, **more),
            engine.new_call(),
        )
    ]
    assert isinstance(items[-1], Tail)
    assert items[-1].body.endswith(b"data: [DONE]\n\n")
    assert not any(b"[DONE]" in item for item in items if isinstance(item, bytes))


async def test_the_facts_say_what_delayed_a_request(engine: Any) -> None:
    """Three long prompts, then one alike: the engine computes theirs first."""

    def prompt(number: int) -> EngineRequest:
        ids = [[number, *range(1000, 7000)]]
        return dataclasses.replace(request(prompt="x", max_tokens=30), request_id=f"r{number}", prompt_token_ids=ids)

    async def head(number: int) -> Head:
        call = engine.new_call(tpot_s=1e-6)
        (only,) = [item async for item in engine.answer(prompt(number), call)]
        assert isinstance(only, Head)
        return only

    first, *_, last = await asyncio.gather(*(head(number) for number in range(1, 5)))
    assert b"kv_transfer_params" not in last.body or json.loads(last.body)["kv_transfer_params"] is None
    assert first.facts.causes.ahead_tokens < last.facts.causes.ahead_tokens
    told = last.facts.causes
    assert told.ahead_prefills == 3
    # What is computed in the step in which it begins, it did not wait for.
    assert 2 * 6001 < told.ahead_tokens <= 3 * 6001
    assert told.waited_steps >= 2
    assert told.chunks >= 1
    assert told.prefill_steps >= told.chunks
    # Every gap is longer than that target; two of 29 are kept, or one.
    assert told.slow_gaps == 29
    assert len(told.gaps) in (1, 2)
    assert told.longest_gap_s >= max(told.gaps)


async def test_timestamps_are_in_order_and_on_the_shared_clock(engine: Any) -> None:
    begin = time.monotonic()
    call = engine.new_call()
    (head,) = [item async for item in engine.answer(request(prompt="x", max_tokens=5), call)]
    assert head.final
    facts = head.facts
    stamps = [begin, facts.queued, facts.scheduled, facts.first_token, facts.last_token, time.monotonic()]
    assert stamps == sorted(stamps)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_frees_the_engine(engine: Any, stream: bool) -> None:
    call = engine.new_call()

    async def read() -> None:
        async for _ in engine.answer(request(prompt="x", max_tokens=8000, stream=stream), call):
            pass

    task = asyncio.create_task(read())
    await until(lambda: call.facts().output_tokens > 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.unfinished_requests == 0
    reached = call.facts().output_tokens
    assert reached < 8000


async def test_closing_a_stream_that_nobody_reads_frees_the_engine(engine: Any) -> None:
    answer = engine.answer(request(prompt="x", max_tokens=8000, stream=True, n=3, temperature=1.0), engine.new_call())
    await anext(answer)
    assert engine.unfinished_requests == 3
    await answer.aclose()
    assert engine.unfinished_requests == 0


async def test_a_refusal_after_rendering_is_a_status_for_streams_too(engine: Any) -> None:
    for stream in (False, True):
        (head,) = [
            item
            async for item in engine.answer(
                request(prompt="x", max_tokens=5, stream=stream, logprobs=500), engine.new_call()
            )
        ]
        assert head.status == 400
        assert head.error is not None
        assert "logprobs" in head.error[1]


async def test_sequences_of_one_prompt_share_it_in_the_counts(engine: Any) -> None:
    call = engine.new_call()
    (head,) = [item async for item in engine.answer(request(prompt="x", max_tokens=4, n=2, temperature=1.0), call)]
    assert (head.facts.sequences, head.facts.prompt_tokens, head.facts.output_tokens) == (2, 3, 8)
