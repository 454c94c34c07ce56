"""Labels of metrics stay few, whatever clients send."""

from __future__ import annotations

import json
import random
import string
from collections import defaultdict
from typing import Any, ClassVar

import httpx
import pytest

from app.api.ingress import build_app
from app.config import SluiceConfig, TracingConfig, parse_config
from app.pools.dispatcher import Dispatcher
from app.routing.keys import Keys
from app.telemetry import metrics as metrics_module
from app.telemetry.metrics import RequestMetrics
from app.telemetry.tracing import Tracing
from app.types import Head
from tests.support.fakes import FakePool, FakeRenderer, FakeStream, facts

REQUESTS = 10_000


class Recorder:
    """Stands in for a metric of Ray's and keeps the label sets that it was given, by metric."""

    seen: ClassVar[defaultdict[str, set[tuple[tuple[str, str], ...]]]] = defaultdict(set)

    def __init__(self, name: str, *args: Any, tag_keys: tuple[str, ...] = (), **kwargs: Any) -> None:
        self._name, self._keys = name, set(tag_keys)

    def note(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self._keys
        self.seen[self._name].add(tuple(sorted(tags.items())))

    inc = set = observe = note


class AnsweringPool(FakePool):
    """Each request has an answer of its own, at once."""

    def dispatch(self, request: Any) -> FakeStream:
        stream = FakeStream()
        stream.put(Head(200, b"{}", final=True, facts=facts()))
        return stream


def config() -> SluiceConfig:
    pool = {"executor": {"kind": "cpu"}, "engine": {"max_model_len": 2048, "kv_cache_memory_mib": 64}}
    return parse_config(
        {
            "model": {"name": "m", "source": "/m"},
            "routing": {"lengths": [{"name": "any"}], "rules": [{"pool": "all"}]},
            "pools": {"all": pool},
            "ingress": {"access_log": False},
        }
    )


def noise(source: random.Random) -> str:
    return "".join(source.choices(string.ascii_letters + string.digits + "-_.%/", k=source.randint(1, 40)))


async def test_labels_are_few_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics_module, name, Recorder)
    monkeypatch.setattr(Recorder, "seen", defaultdict(set))
    served = config()
    pools = {"all": AnsweringPool("all")}
    keys = Keys(())
    keys.configure(None)
    dispatcher = Dispatcher(served, pools)
    tracing = Tracing(TracingConfig(exporter="none"), "ingress")
    app = build_app(
        served,
        FakeRenderer(),
        pools,  # type: ignore[arg-type]
        dispatcher,
        None,  # type: ignore[arg-type]
        tracing,
        RequestMetrics(served.classes, dispatcher.admission.held_by_class),
        keys,
    )
    source = random.Random(1)
    statuses = set()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for number in range(REQUESTS):
            path = "/v1/chat/completions" if number % 4 else f"/{noise(source)}"
            body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "model": noise(source)}
            body["user"] = noise(source)
            if number % 5 == 0:
                body["service_tier"] = noise(source)
            headers = {"x-request-id": noise(source), f"x-{number}": noise(source), "authorization": noise(source)}
            if number % 3 == 0:
                headers["x-priority"] = noise(source)
            answer = await client.post(path, content=json.dumps(body), headers=headers)
            statuses.add(answer.status_code)
    tracing.shutdown()
    assert {200, 400, 404} <= statuses
    assert sum(len(labels) for labels in Recorder.seen.values()) < 80
    told = {value for labels in Recorder.seen.values() for one in labels for _, value in one}
    phases = {"render", "queue", "hold", "engine_wait", "prefill", "decode", "relay", "first_token", "total"}
    assert told <= {*served.classes, *phases, "all", "none", "finished", "rejected", "met"}
