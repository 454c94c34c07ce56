"""A request's way through the ingress, with stand-ins for the renderer and the pools."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.api.ingress import build_app
from app.config import SluiceConfig, TracingConfig, parse_config
from app.errors import AcceptTimeout, PoolSaturated, ReplicaLost
from app.pools.dispatcher import Dispatcher
from app.routing.keys import KeyConfig, Keys, hash_key
from app.telemetry.timeline import read_clock
from app.telemetry.tracing import Tracing
from app.types import Aborted, EngineLoad, Head, PoolHealth, ReplicaState, Tail
from tests.support.asgi import Client
from tests.support.fakes import FakeMetrics, FakePool, FakeRenderer, facts
from tests.support.fleet import load

PATH = "/v1/chat/completions"
CAPPED: dict[str, Any] = {
    "batch": {"service_tier": "flex"},
    "default": {"service_tier": "default", "dials": {"max_output_tokens": 100}},
}
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def config() -> SluiceConfig:
    engine = {"max_model_len": 2048, "kv_cache_memory_mib": 64}
    pool = {"executor": {"kind": "cpu"}, "engine": engine}
    return parse_config(
        {
            "model": {"name": "m", "source": "/m"},
            "routing": {
                "lengths": [{"name": "short", "max_prompt_tokens": 100}, {"name": "long"}],
                "rules": [
                    {"class": "batch", "length": "short", "pool": "batch"},
                    {"length": "short", "pool": "interactive"},
                    {"pool": "long_context"},
                ],
            },
            "pools": {"interactive": pool, "batch": pool, "long_context": pool},
            "ingress": {"max_body_mib": 0.01, "slow_reader_timeout_s": 0.05, "resume_window_s": 0.3},
        }
    )


class FakeHealth:
    """Pools that are as healthy as the test says."""

    def __init__(self) -> None:
        self.healthy = 1

    async def pools(self) -> dict[str, PoolHealth]:
        return {"interactive": PoolHealth(1, 1), "batch": PoolHealth(2, self.healthy)}


class Bench:
    """The ingress with everything behind it in the test's hands."""

    def __init__(self, served: SluiceConfig | None = None) -> None:
        served = served or config()
        self.renderer = FakeRenderer()
        self.pools = {name: FakePool(name) for name in ("interactive", "batch", "long_context")}
        self.metrics = FakeMetrics()
        self.health = FakeHealth()
        self.keys = Keys(())
        self.keys.configure(None)
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(TracingConfig(), "ingress", self.exporter)
        self.dispatcher = Dispatcher(served, self.pools)
        self.app = build_app(
            served,
            self.renderer,
            self.pools,  # type: ignore[arg-type]
            self.dispatcher,
            self.health,  # type: ignore[arg-type]
            self.tracing,
            self.metrics,  # type: ignore[arg-type]
            self.keys,
        )

    def post(self, body: Any, headers: dict[str, str] | None = None, path: str = PATH) -> Client:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Client(self.app, path, raw, headers)

    def learn(self, engine: EngineLoad) -> None:
        """Have every replica tell that state."""
        for pool in self.pools:
            state = ReplicaState(f"{pool}-1", time.monotonic(), read_clock(), {}, engine)
            self.dispatcher.learn(pool, state)

    async def call(self, method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        """A request whose answer is read in one piece."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers)

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracing._provider.force_flush()
        return {span.name: span for span in self.exporter.get_finished_spans()}

    @property
    def outcomes(self) -> list[tuple[str, str, str]]:
        return [(record.service_class, record.pool, record.outcome) for record in self.metrics.ends]


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.tracing.shutdown()


async def test_an_answer_in_one_piece(bench: Bench) -> None:
    client = bench.post({**HELLO, "service_tier": "priority"}, {"x-request-id": "abc-1"})
    await bench.pools["interactive"].dispatched.wait()
    now = bench.pools["interactive"].requests[0].timeline.dispatched
    assert now is not None
    done = facts(queued=now, scheduled=now, first_token=now, last_token=now, prompt_tokens=3, output_tokens=1)
    bench.pools["interactive"].stream.put(Head(200, b'{"ok":1}', final=True, facts=done))
    await client.finish()

    assert (client.status, client.json()) == (200, {"ok": 1})
    assert client.headers["x-sluice-class"] == "interactive"
    assert client.headers["x-sluice-pool"] == "interactive"
    assert client.headers["server-timing"].startswith("render;dur=")
    request = bench.pools["interactive"].requests[0]
    assert (request.request_id, request.service_tier) == ("abc-1", "priority")
    assert request.ttft_s == pytest.approx(0.5003)
    assert request.tpot_s == 0.05
    assert request.prompt_token_ids == [[1, 1, 1]]
    assert bench.outcomes == [("interactive", "interactive", "finished")]
    assert bench.metrics.in_flight == 0


async def test_a_stream_is_relayed_as_it_comes(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True, "service_tier": "flex"})
    stream = bench.pools["batch"].stream
    stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts(queued=1.0)))
    await client.until_sent(2)
    assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert client.body == b"data: 1\n\n"
    stream.put(b"data: 2\n\ndata: 3\n\n")
    await client.until_sent(3)
    stream.put(b"data: [DONE]\n\n", Tail(facts(queued=1.0, scheduled=2.0, output_tokens=3)))
    await client.finish()
    assert client.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"
    assert client.sent[-1]["more_body"] is False
    assert bench.outcomes == [("batch", "batch", "finished")]
    assert not stream.cancelled


async def test_a_reader_that_pauses_gets_everything(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    stream = bench.pools["interactive"].stream
    stream.put(Head(200, b"1", final=False, facts=facts()), b"2", Tail(facts(), body=b"3"))
    client.reads.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    client.reads.set()
    await client.finish()
    assert client.body == b"123"
    assert bench.outcomes == [("standard", "interactive", "finished")]
    assert not bench.metrics.ends[0].is_slow_reader


async def test_a_reader_that_stops_is_given_up_and_counted(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    stream = bench.pools["interactive"].stream
    stream.put(Head(200, b"1", final=False, facts=facts()))
    await client.until_sent(2)
    client.reads.clear()
    stream.put(b"2")
    await client.finish()
    assert client.sent[-1]["more_body"] is True
    assert stream.cancelled
    assert bench.outcomes == [("standard", "interactive", "cancelled")]
    assert bench.metrics.ends[0].is_slow_reader


async def test_what_a_cancelled_request_had_cost_is_what_its_engine_says(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    stream = bench.pools["interactive"].stream
    began = time.monotonic()
    stamps = {"queued": began, "scheduled": began, "first_token": began}
    stream.put(Head(200, b"1", final=False, facts=facts(**stamps, last_token=began, prompt_tokens=5, output_tokens=1)))
    await client.until_sent(2)
    last = facts(**stamps, last_token=began, prompt_tokens=5, output_tokens=40)
    stream.last_words = Aborted(last, time.monotonic() + 3.0)
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    async with asyncio.timeout(5):
        while not bench.metrics.ends:  # noqa: ASYNC110  # it is told by a task that nobody holds
            await asyncio.sleep(0)
    (record,) = bench.metrics.ends
    assert (record.outcome, record.phase, record.timeline.output_tokens) == ("cancelled", "decode", 40)
    assert record.wasted_tokens == 45
    assert record.abort_s == pytest.approx(3.0, abs=1.0)
    assert record.is_slow_reader is False


async def test_a_reader_that_is_slow_but_reads_is_kept(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    stream = bench.pools["interactive"].stream
    stream.put(Head(200, b"1", final=False, facts=facts()))
    await client.until_sent(2)
    client.takes_s = 0.03
    # Takes several times as long as a client may leave a stream unread.
    stream.put(b"2" * (600 << 10), Tail(facts()))
    await client.finish()
    assert bench.outcomes == [("standard", "interactive", "finished")]
    assert b"".join(message.get("body", b"") for message in client.sent).count(b"2") == 600 << 10


async def test_a_stream_that_waits_for_the_engine_is_not_a_slow_reader(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    stream = bench.pools["interactive"].stream
    stream.put(Head(200, b"1", final=False, facts=facts()))
    await asyncio.sleep(0.2)
    stream.put(Tail(facts()))
    await client.finish()
    assert bench.outcomes == [("standard", "interactive", "finished")]


async def test_long_prompts_go_to_their_pool(bench: Bench) -> None:
    bench.pools["long_context"].stream.put(Head(200, b"{}", final=True, facts=facts()))
    client = bench.post({**HELLO, "prompt_tokens": 101, "service_tier": "flex"})
    await client.finish()
    assert client.headers["x-sluice-pool"] == "long_context"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b"\xff\xfe", 400, "not valid UTF-8"),
        (b'{"temperature": NaN}', 400, "NaN is not JSON"),
        (b"[" * 5000, 400, "nested too deeply"),
        (b'{"a": "' + b"x" * 20_000 + b'"}', 413, "larger than 0.01 MiB"),
        ({**HELLO, "service_tier": "gold"}, 400, "service_tier must be one of"),
        ({**HELLO, "kv_transfer_params": {"prompt_token_ids": [1]}}, 400, "cannot be set by clients"),
        ({**HELLO, "max_tokens": 5000}, 400, "exceeds the context of 2048 tokens"),
    ],
)
async def test_a_bad_request_is_refused_before_it_queues(bench: Bench, body: Any, status: int, message: str) -> None:
    client = bench.post(body)
    await client.finish()
    assert client.status == status
    error = client.json()["error"]
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert not any(pool.requests for pool in bench.pools.values())
    assert [outcome for _, _, outcome in bench.outcomes] == ["rejected"]
    assert bench.metrics.in_flight == 0
    attributes = bench.spans()[f"POST {PATH}"].attributes
    assert attributes is not None
    assert attributes["sluice.outcome"] == "rejected"
    assert attributes["http.response.status_code"] == status


async def test_fields_that_steer_the_server_do_not_reach_it(bench: Bench) -> None:
    bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
    client = bench.post({**HELLO, "priority": -5, "request_id": "other", "kv_transfer_params": None})
    await client.finish()
    request = bench.pools["interactive"].requests[0]
    assert request.body == HELLO


async def test_a_refusal_by_the_engine_keeps_its_status(bench: Bench) -> None:
    error = ("BadRequestError", "no such grammar", "response_format")
    bench.pools["interactive"].stream.put(Head(400, b"", final=True, facts=facts(), error=error))
    client = bench.post({**HELLO, "stream": True})
    await client.finish()
    assert client.status == 400
    assert client.json()["error"] == {
        "message": "no such grammar",
        "type": "BadRequestError",
        "param": "response_format",
        "code": 400,
    }
    assert bench.outcomes == [("standard", "interactive", "rejected")]


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (PoolSaturated("full", retry_after=2.4), 503, "rejected"),
        (AcceptTimeout("late", retry_after=5), 503, "evicted"),
        (ReplicaLost("gone", retry_after=1), 503, "failed"),
    ],
)
async def test_a_pool_that_does_not_take_the_request(bench: Bench, error: Any, status: int, outcome: str) -> None:
    bench.pools["interactive"].stream.accept_error = error
    client = bench.post({**HELLO, "stream": True})
    await client.finish()
    assert client.status == status
    assert int(client.headers["retry-after"]) >= 1
    assert bench.outcomes == [("standard", "interactive", outcome)]
    assert bench.pools["interactive"].stream.cancelled
    spans = bench.spans()
    # No replica will tell of it, so the ingress does.
    assert {"queue", "queue.hold", "queue.engine_wait"} <= set(spans)


async def test_a_replica_lost_in_mid_stream_ends_with_an_error_event(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    stream = bench.pools["interactive"].stream
    stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts()), ReplicaLost("the replica stopped"))
    await client.finish()
    assert client.status == 200
    events = client.body.decode().split("\n\n")
    assert events[0] == "data: 1"
    assert json.loads(events[1].removeprefix("data: "))["error"]["message"] == "the replica stopped"
    assert events[2] == "data: [DONE]"
    assert bench.outcomes == [("standard", "interactive", "failed")]


async def test_an_error_inside_the_replica_s_stream_counts_as_failed(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    bench.pools["interactive"].stream.put(
        Head(200, b"data: 1\n\n", final=False, facts=facts()), b'data: {"error":{}}\n\n', Tail(facts(), failed=True)
    )
    await client.finish()
    assert bench.outcomes == [("standard", "interactive", "failed")]


async def test_a_fault_of_our_own_is_a_500_that_tells_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.renderer.error = RuntimeError("secret detail")
    client = bench.post(HELLO)
    await client.finish()
    assert client.status == 500
    assert "secret" not in client.body.decode()
    assert "secret detail" in caplog.text


async def test_a_client_that_leaves_while_rendering(bench: Bench) -> None:
    bench.renderer.gate = asyncio.Event()
    client = bench.post(HELLO)
    client.leave()
    await client.finish()
    assert client.sent == []
    assert [outcome for _, _, outcome in bench.outcomes] == ["cancelled"]
    assert set(bench.spans()) == {f"POST {PATH}", "render"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token(bench: Bench, stream: bool) -> None:
    client = bench.post({**HELLO, "stream": stream})
    await bench.pools["interactive"].dispatched.wait()
    client.leave()
    await client.finish()
    assert bench.pools["interactive"].stream.cancelled
    assert bench.outcomes == [("standard", "interactive", "cancelled")]
    assert bench.metrics.in_flight == 0


async def test_a_client_that_leaves_in_mid_stream(bench: Bench) -> None:
    client = bench.post({**HELLO, "stream": True})
    bench.pools["interactive"].stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts()))
    await client.until_sent(2)
    client.leave()
    await client.finish()
    assert bench.pools["interactive"].stream.cancelled
    assert bench.outcomes == [("standard", "interactive", "cancelled")]


async def test_a_request_cancelled_from_outside_is_counted_and_stays_cancelled(bench: Bench) -> None:
    client = bench.post(HELLO)
    await bench.pools["interactive"].dispatched.wait()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.finish()
    assert bench.pools["interactive"].stream.cancelled
    assert bench.outcomes == [("standard", "interactive", "cancelled")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a-b_c.d:1", "a-b_c.d:1"), ("a b\tc<script>", "abcscript"), ("x" * 500, "x" * 128)],
)
async def test_the_request_id_is_the_callers_cleaned(bench: Bench, given: str, expected: str) -> None:
    bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
    client = bench.post(HELLO, {"x-request-id": given})
    await client.finish()
    assert bench.pools["interactive"].requests[0].request_id == expected
    # Ray Serve's entry repeats the id that it was given; only another one has to be told.
    assert client.headers.get("x-request-id") == (None if given == expected else expected)


async def test_a_request_without_an_id_gets_one(bench: Bench) -> None:
    bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
    client = bench.post(HELLO)
    await client.finish()
    assert client.headers["x-request-id"] == bench.pools["interactive"].requests[0].request_id


async def test_the_trace_reaches_the_replica(bench: Bench) -> None:
    bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    client = bench.post(HELLO, {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "tracestate": "a=1"})
    await client.finish()
    server = bench.spans()[f"POST {PATH}"]
    assert server.context is not None
    assert format(server.context.trace_id, "032x") == trace_id
    carrier = bench.pools["interactive"].requests[0].trace_context
    assert carrier["traceparent"] == f"00-{trace_id}-{server.context.span_id:016x}-01"
    assert carrier["tracestate"] == "a=1"


class TestLostReplicas:
    """A replica that dies before it gave anything is not the client's affair."""

    async def test_another_one_answers(self, bench: Bench) -> None:
        lost, other = bench.pools["interactive"], bench.pools["batch"]
        lost.stream.put(ReplicaLost("gone"))
        other.stream.put(Head(200, b'{"ok":1}', final=True, facts=facts()))
        client = bench.post(HELLO)
        await client.finish()
        assert (client.status, client.json()) == (200, {"ok": 1})
        assert client.headers["x-sluice-pool"] == "batch"
        assert bench.outcomes == [("standard", "batch", "finished")]
        assert lost.stream.cancelled

    async def test_but_not_once_something_was_sent(self, bench: Bench) -> None:
        lost = bench.pools["interactive"]
        lost.stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts()), ReplicaLost("gone"))
        client = bench.post({**HELLO, "stream": True})
        await client.finish()
        assert client.status == 200
        assert b"gone" in client.body
        assert not bench.pools["batch"].requests
        assert bench.outcomes == [("standard", "interactive", "failed")]

    async def test_nor_for_ever(self, bench: Bench) -> None:
        for pool in bench.pools.values():
            for _ in range(10):
                pool.stream.put(ReplicaLost("gone"))
        client = bench.post({**HELLO, "service_tier": "priority"})
        await client.finish()
        assert client.status == 503
        assert len(bench.outcomes) == 1


class TestKeys:
    """API keys, where there are any."""

    @pytest.fixture(autouse=True)
    def _keys(self, bench: Bench) -> None:
        bench.keys.configure(
            [
                KeyConfig(name="team", sha256=hash_key("sk-1"), requests_per_minute=2, weight=2),
                KeyConfig(name="nightly", sha256=hash_key("sk-2"), classes=("batch",)),
            ]
        )

    @pytest.mark.parametrize("given", [None, "Bearer sk-3", "Bearer", "Basic sk-1", "sk-1"])
    async def test_without_a_known_one_nothing_is_done(self, bench: Bench, given: str | None) -> None:
        client = bench.post(HELLO, {"authorization": given} if given else {})
        await client.finish()
        assert client.status == 401
        assert not bench.renderer.bodies
        assert "sk-" not in client.body.decode()

    async def test_one_that_may_not_ask_for_a_class_is_told_so(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "service_tier": "priority"}, {"authorization": "Bearer sk-2"})
        await client.finish()
        assert client.status == 403
        assert "`batch`" in client.json()["error"]["message"]

    async def test_one_that_has_had_its_part_is_told_when_to_come_back(self, bench: Bench) -> None:
        pool = bench.pools["interactive"]
        for _ in range(2):
            pool.stream.put(Head(200, b"{}", final=True, facts=facts()))
            client = bench.post(HELLO, {"authorization": "Bearer sk-1"})
            await client.finish()
            assert client.status == 200
        client = bench.post(HELLO, {"authorization": "Bearer sk-1"})
        await client.finish()
        assert client.status == 429
        assert 25 <= int(client.headers["retry-after"]) <= 30
        assert client.json()["error"]["details"] == {"reason": "requests_per_minute"}


async def test_a_request_that_would_be_late_is_refused_before_it_reaches_a_pool(bench: Bench) -> None:
    bench.learn(load(60.0))
    client = bench.post({**HELLO, "service_tier": "priority"})
    await client.finish()
    assert client.status == 503
    error = client.json()["error"]
    assert error["details"]["reason"] == "predicted_late"
    assert error["details"]["predicted_ttft_ms"] > 50_000
    assert int(client.headers["retry-after"]) > 50
    assert not bench.pools["interactive"].requests
    assert bench.outcomes == [("interactive", "interactive", "rejected")]


async def test_an_output_beyond_the_cap_is_lowered_and_told(bench: Bench) -> None:
    capped = {**config().model_dump(), "classes": CAPPED}
    bench.app.configure(parse_config(capped))
    bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
    client = bench.post({**HELLO, "max_tokens": 500})
    await client.finish()
    assert client.headers["x-sluice-notes"] == "max_tokens=100"
    body = bench.pools["interactive"].requests[0].body
    assert (body["max_completion_tokens"], body.get("max_tokens")) == (100, None)


async def test_or_refused_where_the_class_says_so(bench: Bench) -> None:
    strict = {"default": {**CAPPED["default"], "limits": {"over_max_output": "reject"}}}
    bench.app.configure(parse_config({**config().model_dump(), "classes": {**CAPPED, **strict}}))
    client = bench.post({**HELLO, "max_tokens": 500})
    await client.finish()
    assert client.status == 400
    assert "at most 100" in client.json()["error"]["message"]


class TestById:
    """Cancelling requests and resuming streams by their ids."""

    async def test_a_request_is_cancelled_by_its_id(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "stream": True}, {"x-request-id": "r-1"})
        stream = bench.pools["interactive"].stream
        stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts()))
        await client.until_sent(2)
        answer = await bench.call("POST", "/v1/requests/r-1/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
        await client.finish()
        assert b"RequestCancelledError" in client.body
        assert client.body.endswith(b"data: [DONE]\n\n")
        assert stream.cancelled
        assert bench.outcomes == [("standard", "interactive", "cancelled")]
        assert (await bench.call("POST", "/v1/requests/r-1/cancel")).status_code == 404

    async def test_before_it_was_answered_it_gets_a_status(self, bench: Bench) -> None:
        client = bench.post(HELLO, {"x-request-id": "r-1"})
        await bench.pools["interactive"].dispatched.wait()
        await bench.call("POST", "/v1/requests/r-1/cancel")
        await client.finish()
        assert client.status == 499

    async def test_a_resumable_stream_survives_its_connection(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "stream": True}, {"x-request-id": "r-1", "x-sluice-resume": "allow"})
        stream = bench.pools["interactive"].stream
        stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts()))
        await client.until_sent(2)
        assert client.body == b"id: 1\ndata: 1\n\n"
        client.leave()
        await client.finish()
        stream.put(b"data: 2\n\ndata: 3\n\n", Tail(facts(), body=b"data: [DONE]\n\n"))
        answer = await bench.call("GET", "/v1/requests/r-1/events", {"last-event-id": "1"})
        assert answer.text == "id: 2\ndata: 2\n\nid: 3\ndata: 3\n\nid: 4\ndata: [DONE]\n\n"
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert not stream.cancelled
        assert bench.outcomes == [("standard", "interactive", "finished")]
        # It is kept for a while.
        assert (await bench.call("GET", "/v1/requests/r-1/events", {"last-event-id": "3"})).text.startswith("id: 4")

    async def test_nobody_comes_back(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "stream": True}, {"x-request-id": "r-1", "x-sluice-resume": "allow"})
        stream = bench.pools["interactive"].stream
        stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts()))
        await client.until_sent(2)
        client.leave()
        await client.finish()
        await asyncio.wait_for(bench.metrics.has_ended.wait(), 5)
        assert stream.cancelled
        assert (await bench.call("GET", "/v1/requests/r-1/events")).status_code == 410

    async def test_a_stream_that_was_not_resumable_is_gone(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "stream": True}, {"x-request-id": "r-1"})
        bench.pools["interactive"].stream.put(Head(200, b"data: 1\n\n", final=False, facts=facts()))
        await client.until_sent(2)
        answer = await bench.call("GET", "/v1/requests/r-1/events", {"last-event-id": "1"})
        assert answer.status_code == 410
        assert "x-sluice-resume" in answer.json()["error"]["message"]
        client.leave()
        await client.finish()

    async def test_an_error_of_a_resumable_request_is_told_as_ever(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "service_tier": "gold"}, {"x-sluice-resume": "allow"})
        await client.finish()
        assert client.status == 400


class TestWhatBecameOfARequest:
    """`GET /v1/requests/{id}`."""

    async def test_it_is_told_while_it_lasts_and_afterwards(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "service_tier": "priority"}, {"x-request-id": "r-1"})
        await bench.pools["interactive"].dispatched.wait()
        assert (await bench.call("GET", "/v1/requests/r-1")).json()["outcome"] == "in_progress"
        bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
        await client.finish()
        told = (await bench.call("GET", "/v1/requests/r-1")).json()
        assert (told["id"], told["class"], told["pool"], told["outcome"]) == (
            "r-1",
            "interactive",
            "interactive",
            "finished",
        )
        assert told["trace_id"] == f"{next(iter(bench.spans().values())).context.trace_id:032x}"
        assert told["phases"][0]["name"] == "render"
        missing = await bench.call("GET", "/v1/requests/r-2")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")

    async def test_a_refusal_says_why_and_what_was_predicted(self, bench: Bench) -> None:
        bench.learn(load(5.0, prefill_tokens=5000))
        client = bench.post({**HELLO, "prompt_tokens": 90, "service_tier": "priority"}, {"x-request-id": "r-1"})
        await client.finish()
        told = (await bench.call("GET", "/v1/requests/r-1")).json()
        assert (told["verdict"], told["reason"], told["status"]) == ("refused", "predicted_late", 503)
        assert bench.metrics.ends[0].verdict == "refused"

    async def test_only_its_own_key_sees_it(self, bench: Bench) -> None:
        bench.keys.configure([KeyConfig(name=name, sha256=hash_key(f"sk-{name}")) for name in ("a", "b")])
        bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
        client = bench.post(HELLO, {"x-request-id": "r-1", "authorization": "Bearer sk-a"})
        await client.finish()
        statuses = [
            (await bench.call("GET", "/v1/requests/r-1", headers)).status_code
            for headers in ({"authorization": "Bearer sk-a"}, {"authorization": "Bearer sk-b"}, None)
        ]
        assert statuses == [200, 404, 401]


class TestConsole:
    """Its page and its figures."""

    async def test_its_page_is_complete_in_itself(self, bench: Bench) -> None:
        page = await bench.call("GET", "/console")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"(src|href)=\"(?!data:)|https?:|url\(", page.text)

    async def test_it_tells_classes_pools_and_requests(self, bench: Bench) -> None:
        bench.learn(load(running=2, waiting=1, prefill_tokens=500, kv_free_tokens=75_000))
        bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
        await bench.post({**HELLO, "service_tier": "priority"}, {"x-request-id": "r-1"}).finish()
        live = (await bench.call("GET", "/console/live")).json()
        interactive = live["classes"][0]
        assert (interactive["name"], interactive["requests"], interactive["attainment"]) == ("interactive", 1, 1.0)
        replica = live["pools"][0]["replicas"][0]
        assert (replica["running"], replica["waiting"], replica["kv_used_share"]) == (2, 1, 0.25)
        assert [request["id"] for request in live["requests"]] == ["r-1"]

    async def test_keys_see_their_own_requests_only(self, bench: Bench) -> None:
        bench.keys.configure([KeyConfig(name=name, sha256=hash_key(f"sk-{name}")) for name in ("a", "b")])
        bench.pools["interactive"].stream.put(Head(200, b"{}", final=True, facts=facts()))
        await bench.post(HELLO, {"authorization": "Bearer sk-a"}).finish()
        assert (await bench.call("GET", "/console/live")).status_code == 401
        seen = {
            key: (await bench.call("GET", "/console/live", {"authorization": f"Bearer sk-{key}"})).json()["requests"]
            for key in ("a", "b")
        }
        assert (len(seen["a"]), len(seen["b"])) == (1, 0)

    async def test_it_can_be_left_out(self, bench: Bench) -> None:
        dumped = config().model_dump()
        dumped["ingress"]["console"] = False
        off = Bench(parse_config(dumped))
        assert (await off.call("GET", "/console")).status_code == 404
        assert (await off.call("GET", "/console/live")).status_code == 404
        off.tracing.shutdown()


class TestLadder:
    """What a request gets instead of a refusal, where that is allowed."""

    @pytest.fixture(autouse=True)
    def _full(self, bench: Bench) -> None:
        bench.learn(load(0.6, prefill_tokens=600))

    async def test_without_leave_it_is_refused(self, bench: Bench) -> None:
        client = bench.post({**HELLO, "prompt_tokens": 90, "service_tier": "priority"})
        await client.finish()
        assert client.status == 503
        assert "x-sluice-degraded" not in client.headers

    async def test_each_step_is_told(self, bench: Bench) -> None:
        bench.pools["batch"].stream.put(Head(200, b"{}", final=True, facts=facts()))
        body = {**HELLO, "prompt_tokens": 90, "service_tier": "priority"}
        client = bench.post(body, {"x-sluice-degrade": "allow"})
        await client.finish()
        assert client.status == 200
        assert client.headers["x-sluice-degraded"] == "max_tokens=256, class=batch"
        assert client.headers["x-sluice-class"] == "batch"
        request = bench.pools["batch"].requests[0]
        assert (request.service_class, request.ttft_s) == ("batch", None)
        assert request.body["max_completion_tokens"] == 256
        assert request.notes == ("max_tokens=256", "class=batch")
        assert bench.outcomes == [("batch", "batch", "finished")]
        assert bench.metrics.in_flight == 0

    async def test_a_class_may_allow_it_itself(self, bench: Bench) -> None:
        classes = config().model_dump()["classes"]
        classes["interactive"]["degrade"]["allowed"] = True
        bench.app.configure(parse_config({**config().model_dump(), "classes": classes}))
        bench.pools["batch"].stream.put(Head(200, b"{}", final=True, facts=facts()))
        client = bench.post({**HELLO, "prompt_tokens": 90, "service_tier": "priority"})
        await client.finish()
        assert client.headers["x-sluice-class"] == "batch"

    async def test_what_the_key_may_not_have_is_no_step(self, bench: Bench) -> None:
        bench.keys.configure([KeyConfig(name="a", sha256=hash_key("sk-1"), classes=("interactive",))])
        headers = {"x-sluice-degrade": "allow", "authorization": "Bearer sk-1"}
        client = bench.post({**HELLO, "prompt_tokens": 90, "service_tier": "priority"}, headers)
        await client.finish()
        assert client.status == 503
