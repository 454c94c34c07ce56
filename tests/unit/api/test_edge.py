"""What Ray Serve's entry lets through."""

from app.api.edge import clean_headers, middlewares


def test_steering_headers_are_dropped_and_others_kept() -> None:
    headers = [
        (b"x-request-id", b"abc"),
        (b"X-Request-Timeout-Seconds", b"0"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"x-vllm-priority", b"-9"),
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
