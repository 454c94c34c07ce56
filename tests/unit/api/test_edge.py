"""What Ray Serve's entry lets through."""

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.api.edge import EdgeHeaders, clean_headers, middlewares, received_at
from app.types import ClockReading


def test_steering_headers_are_dropped_and_others_kept() -> None:
    headers = [
        (b"x-request-id", b"abc"),
        (b"X-Request-Timeout-Seconds", b"0"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"x-vllm-priority", b"-9"),
        (b"x-sluice-received", b"here 1"),
        (b"authorization", b"Bearer k"),
        (b"traceparent", b"00-1"),
    ]
    assert clean_headers(headers) == [
        (b"authorization", b"Bearer k"),
        (b"traceparent", b"00-1"),
        (b"x-request-id", b"abc"),
    ]


def test_there_is_always_exactly_one_clean_request_id() -> None:
    many = clean_headers([(b"x-request-id", b"a\x00<b>"), (b"X-Request-ID", b"second")])
    assert many == [(b"x-request-id", b"ab")]
    ((name, value),) = clean_headers([])
    assert name == b"x-request-id"
    assert len(value) == 32


def test_ray_serve_accepts_the_middlewares() -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return

    assert validate_http_proxy_callback_return(middlewares())


CLOCK = ClockReading(boot_id="here", wall_offset=0.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("here 99.5", 99.5),
        ("here 100.5", 100.0),  # not yet
        ("here 10.0", 100.0),  # too long ago
        ("elsewhere 99.5", 100.0),
        ("here nan", 100.0),
        ("here", 100.0),
        ("", 100.0),
    ],
)
def test_the_arrival_is_the_entrys_where_it_is_plausible(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: float
) -> None:
    monkeypatch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "app.api.edge:middlewares")
    assert received_at({"x-sluice-received": value}, 100.0, CLOCK) == expected


def test_the_arrival_of_an_entry_that_does_not_clean_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", raising=False)
    assert received_at({"x-sluice-received": "here 99.5"}, 100.0, CLOCK) == 100.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], 1),
        ([{"type": "http.response.start"}, {"type": "http.response.body", "body": b"x", "more_body": True}], 1),
        ([{"type": "http.response.start"}, {"type": "http.response.body", "body": b"x"}], 0),
    ],
)
async def test_a_client_counts_as_gone_unless_its_answer_was_complete(answer: list[Message], expected: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in answer:
            await send(message)
        assert (await receive())["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    left: list[None] = []
    await EdgeHeaders(app, lambda: left.append(None))({"type": "http", "headers": []}, receive, send)
    assert len(left) == expected
