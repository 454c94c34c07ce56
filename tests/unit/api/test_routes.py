"""The routes around generation."""

import httpx
import pytest

from tests.support.fleet import load
from tests.unit.api.test_generation import Bench, bench

__all__ = ["bench"]


async def get(bench: Bench, path: str, method: str = "GET") -> httpx.Response:
    transport = httpx.ASGITransport(app=bench.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path)


async def test_models_are_listed_and_shown(bench: Bench) -> None:
    assert (await get(bench, "/v1/models")).json()["data"][0]["id"] == "m"
    assert (await get(bench, "/v1/models/m")).json()["id"] == "m"


async def test_health_is_about_this_process_and_ready_about_the_pools(bench: Bench) -> None:
    assert (await get(bench, "/health")).status_code == 200
    ready = await get(bench, "/ready")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert ready.json()["pools"]["batch"] == {"replicas": 2, "healthy": 1}
    # Serve does not know yet.
    bench.dispatcher.lose("batch", "batch-1")
    ready = await get(bench, "/ready")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    bench.learn(load())
    assert (await get(bench, "/ready")).status_code == 200
    bench.health.healthy = 0
    ready = await get(bench, "/ready")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert (await get(bench, "/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/other", 404),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
    ],
)
async def test_what_is_not_there_is_an_openai_error(bench: Bench, method: str, path: str, status: int) -> None:
    answer = await get(bench, path, method)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status
    assert answer.headers["x-request-id"]
