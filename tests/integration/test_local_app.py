"""The main job: a real model behind one endpoint, used through the `openai` client."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from app.pools.client import listening_host
from tests.integration.conftest import LocalApp
from tests.support.metrics import scrape, settled_total, total
from tests.support.serving import get, wait_for

pytestmark = pytest.mark.integration

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL_WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "digit": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["ok", "digit"],
            "additionalProperties": False,
        },
    },
}


def test_serve_tells_where_it_listens(local_app: LocalApp) -> None:
    assert f"//{listening_host()}:" in local_app.url


def test_a_chat_answer_tells_where_its_time_went(local_app: LocalApp) -> None:
    raw = local_app.client.chat.completions.with_raw_response.create(
        model=local_app.model,
        messages=[{"role": "user", "content": "What is 1+1?"}],
        max_tokens=8,
        temperature=0,
        service_tier="priority",
        extra_headers={"x-request-id": "my-request.1"},
    )
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.service_tier == "priority"
    assert answer.id == "chatcmpl-my-request.1"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8 or answer.choices[0].finish_reason == "stop"
    assert raw.headers["x-request-id"] == "my-request.1"
    assert raw.headers["x-sluice-class"] == "interactive"
    assert raw.headers["x-sluice-pool"] == "interactive"
    timing = {part.split(";")[0].strip() for part in raw.headers["server-timing"].split(",")}
    assert timing == {"render", "queue", "prefill", "decode", "total"}


def test_a_stream_says_the_same_as_an_answer_in_one_piece(local_app: LocalApp) -> None:
    request: dict[str, Any] = {"model": local_app.model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = local_app.client.chat.completions.create(**request)
    chunks = list(
        local_app.client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].service_tier == "default"
    usage = chunks[-1]
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert usage.model_extra is not None
    metrics = usage.model_extra["metrics"]
    assert set(metrics) == {
        "time_to_first_token_ms",
        "queue_time_ms",
        "prefill_time_ms",
        "generation_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }
    assert all(value >= 0 for value in metrics.values())


def test_completions_streamed_and_not_for_several_prompts(local_app: LocalApp) -> None:
    request: dict[str, Any] = {"model": local_app.model, "prompt": ["One, two,", "A, B,"], "max_tokens": 6}
    request["temperature"] = 0
    whole = local_app.client.completions.create(**request)
    texts = {0: "", 1: ""}
    for chunk in local_app.client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_two_choices(local_app: LocalApp) -> None:
    answer = local_app.client.chat.completions.create(
        model=local_app.model, messages=HELLO, max_tokens=6, n=2, temperature=1.0, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_logprobs(local_app: LocalApp) -> None:
    answer = local_app.client.chat.completions.create(
        model=local_app.model, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)


def test_a_json_schema_is_kept(local_app: LocalApp) -> None:
    answer = local_app.client.chat.completions.create(
        model=local_app.model, messages=HELLO, max_tokens=80, temperature=0, response_format=SCHEMA
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"ok", "digit"}
    assert isinstance(value["ok"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_taken(local_app: LocalApp, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": local_app.model,
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "tools": [WEATHER],
        "tool_choice": CALL_WEATHER,
        "max_tokens": 60,
        "temperature": 0,
    }
    if stream:
        name, arguments = "", ""
        for chunk in local_app.client.chat.completions.create(**request, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    else:
        message = local_app.client.chat.completions.create(**request).choices[0].message
        assert message.tool_calls
        name, arguments = message.tool_calls[0].function.name, message.tool_calls[0].function.arguments
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")

    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    answer = local_app.client.chat.completions.create(
        model=local_app.model,
        messages=[
            {"role": "user", "content": "Weather in Rome?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        tools=[WEATHER],
        max_tokens=8,
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("tier", "words", "service_class", "pool"),
    [
        ("priority", 5, "interactive", "interactive"),
        ("auto", 5, "standard", "interactive"),
        ("flex", 5, "batch", "batch"),
        ("priority", 1700, "interactive", "long_context"),
        ("flex", 1700, "batch", "long_context"),
    ],
)
def test_class_and_length_choose_the_pool(
    local_app: LocalApp, tier: Any, words: int, service_class: str, pool: str
) -> None:
    raw = local_app.client.completions.with_raw_response.create(
        model=local_app.model, prompt=f"{tier} " * words, max_tokens=1, extra_body={"service_tier": tier}
    )
    assert raw.headers["x-sluice-class"] == service_class
    assert raw.headers["x-sluice-pool"] == pool


def test_models(local_app: LocalApp) -> None:
    models = local_app.client.models
    assert [model.id for model in models.list()] == [local_app.model]
    assert models.retrieve(local_app.model).id == local_app.model


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"service_tier": "gold"}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (openai.BadRequestError, {"response_format": {"type": "json_schema"}}),
        (openai.BadRequestError, {"extra_body": {"structured_outputs": {"json": {"$ref": "#"}}}}),
        (openai.NotFoundError, {"model": "nobody"}),
    ],
)
def test_every_error_is_the_exception_that_the_client_maps_it_to(
    local_app: LocalApp, expected: type[openai.APIStatusError], fields: dict[str, Any], stream: bool
) -> None:
    request: dict[str, Any] = {"model": local_app.model, "messages": HELLO, "max_tokens": 5, "stream": stream}
    with pytest.raises(expected) as caught:
        local_app.client.chat.completions.create(**{**request, **fields})
    assert isinstance(caught.value.body, dict)
    assert {"message", "type", "param", "code"} <= set(caught.value.body)
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/completions", b'{"a":' * 3000, 400),
        ("POST", "/v1/completions", b'{"prompt":"' + b"x" * (17 << 20) + b'"}', 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v1/models/none", b"", 404),
        ("POST", "/v1/embeddings", b"{}", 404),
    ],
)
def test_whatever_comes_over_the_wire_is_answered_in_openai_s_shape(
    local_app: LocalApp, method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(method, local_app.url + path, content=content, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_tells_queue_prefill_and_decode(local_app: LocalApp, stream: bool) -> None:
    trace_id = random.randbytes(16).hex()
    caller = random.randbytes(8).hex()
    answer = httpx.post(
        f"{local_app.url}/v1/chat/completions",
        json={"model": local_app.model, "messages": HELLO, "max_tokens": 8, "stream": stream, "ignore_eos": True},
        headers={"traceparent": f"00-{trace_id}-{caller}-01", "x-request-id": f"traced-{stream}"},
        timeout=60,
    )
    assert answer.status_code == 200
    server_name = "POST /v1/chat/completions"
    phases = ("render", "queue", "prefill", "decode", "relay")
    spans = local_app.receiver.trace(trace_id, server_name, *phases, "queue.hold", "queue.engine_wait")
    server = spans[server_name]
    assert server.parent_id == caller
    for name in phases:
        assert spans[name].parent_id == server.span_id
        assert spans[name].seconds >= 0
    assert server.resource["sluice.role"] == "ingress"
    assert spans["prefill"].attributes["sluice.pool"] == "interactive"
    assert spans["prefill"].attributes["sluice.prefill.chunks"] == 1

    # One clock: each phase begins where the one before it ended, and together they are the server span.
    ends = [server.start]
    for name in phases:
        assert spans[name].start == pytest.approx(ends[-1], abs=2e-6)
        ends.append(spans[name].end)
    assert ends[-1] == pytest.approx(server.end, abs=2e-6)

    attributes = server.attributes
    assert attributes["sluice.class"] == "standard"
    assert attributes["sluice.pool"] == "interactive"
    assert attributes["sluice.outcome"] == "finished"
    assert attributes["sluice.replica"]
    assert attributes["sluice.request_id"] == f"traced-{stream}"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == local_app.model
    assert attributes["gen_ai.usage.input_tokens"] == spans["prefill"].attributes["gen_ai.usage.input_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 8
    assert attributes["http.response.status_code"] == 200


def test_a_rejected_request_ends_its_trace_marked_as_rejected(local_app: LocalApp) -> None:
    trace_id = random.randbytes(16).hex()
    httpx.post(
        f"{local_app.url}/v1/completions",
        json={"model": local_app.model, "prompt": "x", "temperature": -1},
        headers={"traceparent": f"00-{trace_id}-{'1' * 16}-01"},
    )
    server = local_app.receiver.trace(trace_id, "POST /v1/completions")["POST /v1/completions"]
    assert server.attributes["sluice.outcome"] == "rejected"
    assert server.attributes["http.response.status_code"] == 400
    assert server.attributes["error.type"] == "BadRequestError"


def test_a_cancelled_request_ends_its_trace_and_its_work(local_app: LocalApp) -> None:
    trace_id = random.randbytes(16).hex()
    with httpx.stream(
        "POST",
        f"{local_app.url}/v1/completions",
        json={"model": local_app.model, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True},
        headers={"traceparent": f"00-{trace_id}-{'1' * 16}-01"},
        timeout=60,
    ) as answer:
        next(answer.iter_bytes())
    spans = local_app.receiver.trace(trace_id, "POST /v1/completions", "decode")
    for name in ("POST /v1/completions", "decode"):
        assert spans[name].attributes["sluice.outcome"] == "cancelled"
    assert spans["decode"].seconds < 60
    assert 0 < spans["decode"].attributes["gen_ai.usage.output_tokens"] < 2000
    wait_for("idle engines", lambda: local_app.unfinished() == 0)


def send_and_hang_up(url: str, body: dict[str, Any], after_s: float) -> None:
    """Send a whole request, then close the connection at a moment of the test's choosing."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        time.sleep(after_s)


def test_thirty_clients_that_hang_up_leave_nothing_running(local_app: LocalApp) -> None:
    """At any moment: while it renders, waits, prefills or streams."""
    wait_for("idle engines", lambda: local_app.unfinished() == 0)
    name = "ray_sluice_requests_total"
    left = "ray_sluice_client_disconnects_total"
    outcomes = ("finished", "failed", "cancelled", "rejected")
    before = {outcome: settled_total(name, outcome=outcome) for outcome in outcomes}
    left_before = settled_total(left)
    chance = random.Random(7)
    threads = []
    for index in range(30):
        body = {
            "model": local_app.model,
            "prompt": f"{index} " + "word " * chance.choice([3, 400, 1300]),
            "max_tokens": 1500 if index % 3 else 400,
            "ignore_eos": True,
            "stream": index % 2 == 0,
            "service_tier": chance.choice(["priority", "default", "flex"]),
        }
        delay = chance.choice([0.0, 0.1, 0.3, 1.0, 2.0]) * chance.uniform(0.8, 1.2)
        threads.append(threading.Thread(target=send_and_hang_up, args=(local_app.url, body, delay)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for("idle engines", lambda: local_app.unfinished() == 0, timeout_s=10)

    def counted() -> float:
        samples = scrape()
        refused = total(samples, name, outcome="rejected") - before["rejected"]
        return total(samples, left) - left_before + refused

    # All are counted at the entry, but for those that were refused, as they would have been late, before they left;
    # those that had come as far as the ingress also by their class and pool.
    wait_for("30 counted disconnects and refusals", lambda: counted() >= 30, every_s=1)
    assert settled_total(left) <= left_before + 30
    after = {outcome: settled_total(name, outcome=outcome) for outcome in before}
    assert before["cancelled"] < after["cancelled"] <= before["cancelled"] + 30
    assert (after["finished"], after["failed"]) == (before["finished"], before["failed"])


def test_the_gauges_are_at_zero_when_nothing_runs(local_app: LocalApp) -> None:
    wait_for("idle engines", lambda: local_app.unfinished() == 0)

    def idle() -> bool:
        gauges = {
            sample.labels["class"]: sample.value
            for sample in scrape()
            if sample.name == "ray_sluice_requests_in_flight"
        }
        return gauges == {"interactive": 0, "standard": 0, "batch": 0}

    wait_for("gauges at zero", idle, every_s=0.5)


def test_metrics_reach_prometheus(local_app: LocalApp) -> None:
    local_app.client.completions.create(
        model=local_app.model, prompt="One, two,", max_tokens=5, extra_body={"service_tier": "flex", "ignore_eos": True}
    )
    wanted = [
        *[
            f"ray_sluice_{name}_count"
            for name in (
                "time_to_first_token_seconds",
                "time_per_output_token_seconds",
                "queue_seconds",
                "prefill_seconds",
                "decode_seconds",
                "request_duration_seconds",
            )
        ],
        "ray_sluice_input_tokens_total",
        "ray_sluice_output_tokens_total",
        "ray_sluice_requests_total",
    ]
    labels = {"class": "batch", "pool": "batch"}

    def missing() -> list[str]:
        samples = scrape()
        return [name for name in wanted if total(samples, name, **labels) <= 0]

    wait_for("all metrics", lambda: not missing() or None, timeout_s=30, every_s=1, otherwise=missing)
    wait_for("vLLM's own", lambda: any(sample.name.startswith("ray_vllm_") for sample in scrape()), every_s=1)
    wait_for(
        "the scheduler's",
        lambda: any(sample.name == "ray_sluice_scheduler_steps_total" and sample.value > 0 for sample in scrape()),
        every_s=1,
    )


def test_health_and_ready_are_cheap_and_truthful(local_app: LocalApp) -> None:
    assert get(f"{local_app.url}/health") == (200, b'{"status":"ok"}')
    status, body = get(f"{local_app.url}/ready")
    assert status == 200
    assert json.loads(body) == {
        "ready": True,
        "http": "haproxy",
        "pools": {pool: {"replicas": 1, "healthy": 1} for pool in ("interactive", "batch", "long_context")},
    }
