"""Every error, as the `openai` client's exception that it becomes."""

from __future__ import annotations

import httpx2
import openai
import pytest

from app.errors import EngineError, RequestError, from_engine

EXPECTED: dict[int, type[openai.APIStatusError]] = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    405: openai.APIStatusError,
    410: openai.APIStatusError,
    499: openai.APIStatusError,
    413: openai.APIStatusError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    501: openai.InternalServerError,
    503: openai.InternalServerError,
}

ERRORS = [
    *[kind("what went wrong", param="n") for kind in RequestError.__subclasses__() if kind is not EngineError],
    *[from_engine(status, "SomeError", "what went wrong", "n") for status in (400, 404, 500, 501, 503)],
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error.status}")
def test_what_the_client_raises(error: RequestError) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(error.status, json=error.body())

    transport = httpx2.MockTransport(answer)
    with (
        httpx2.Client(transport=transport) as http_client,
        openai.OpenAI(base_url="http://test/v1", api_key="k", max_retries=0, http_client=http_client) as client,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        client.completions.create(model="m", prompt="x")
    assert type(caught.value) is EXPECTED[error.status]
    assert caught.value.status_code == error.status
    assert caught.value.body == {
        "message": "what went wrong",
        "type": error.kind,
        "param": "n",
        "code": error.status,
    }


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error.status}")
def test_a_clients_mistake_is_never_counted_as_a_failure(error: RequestError) -> None:
    assert (error.outcome == "failed") <= (error.status >= 500)
    assert error.retryable == (error.status in (429, 503)) == (error.retry_after is not None)
