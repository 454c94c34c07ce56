"""The streaming path as ./scripts/serve sets it up: HAProxy, one ingress, a channel, readers of all kinds."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import ray

from tests.support.metrics import scrape, total
from tests.support.serving import CONFIGS, ROOT, get, named, open_client, running, url_of, variant, wait_for, wait_ready

pytestmark = pytest.mark.integration

MODEL = "llama-3.1-8b-simulated"
SLOW_READER_S = 4.0


def one_pool(document: dict[str, Any]) -> None:
    args = document["applications"][0]["args"]
    pool = args["pools"]["interactive"]
    pool["num_gpus"] = 0
    args["pools"] = {"interactive": pool}
    args["routing"] = {"lengths": [{"name": "any"}], "rules": [{"pool": "interactive"}]}
    args["ingress"] = {"num_cpus": 0.2, "slow_reader_timeout_s": SLOW_READER_S}


class App:
    """A running app and its processes."""

    def __init__(self, url: str, process: Any) -> None:
        self.url = url
        self.process = process

    def named(self, text: str) -> list[psutil.Process]:
        return named(psutil.Process(self.process.pid).children(recursive=True), text)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("streaming")
    config = variant(CONFIGS / "simulated.yaml", folder / "app.yaml", one_pool)
    log = folder / "serve.log"
    command = [str(ROOT / "scripts" / "serve"), "--no-setup", str(config)]
    with running(command, log, {"RAY_metrics_report_interval_ms": "1000"}) as process:
        wait_ready(url_of(config), lambda: process.poll() is None, log)
        # Only for a cluster that it finds by itself does Ray use the token that `serve run` has written.
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
        try:
            yield App(url_of(config), process)
        finally:
            ray.shutdown()


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "extra_body": {"ignore_eos": True}, **more}


def test_requests_come_by_haproxy(app: App) -> None:
    assert json.loads(get(f"{app.url}/ready")[1])["http"] == "haproxy"


def test_the_entry_and_haproxys_own_ports_are_on_loopback_only(app: App) -> None:
    (haproxy,) = app.named("haproxy -db")
    listening = [entry.laddr for entry in haproxy.net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
    assert urlsplit(app.url).port in {address.port for address in listening}
    assert len(listening) == 3
    for process in [haproxy, *app.named("ServeReplica:sluice:ingress")]:
        for entry in process.net_connections("tcp4"):
            if entry.status == psutil.CONN_LISTEN:
                assert entry.laddr.ip == "127.0.0.1", entry


def test_streams_that_run_together_are_complete_and_not_mixed_up(app: App) -> None:
    def one(index: int) -> None:
        with open_client(app.url) as client:
            request = body(f"prompt number {index} " * (index % 5 + 1), 20 + 7 * index)
            whole = client.completions.create(**request)
            chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        # The simulated engine's tokens depend on the prompt only.
        assert text == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20 + 7 * index

    with ThreadPoolExecutor(24) as threads:
        for result in [threads.submit(one, index) for index in range(24)]:
            result.result(timeout=120)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 3, "seed": 1},
        {"logprobs": 2},
        {"stop": ["zzzz"]},
        {"echo": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_streams_that_tell_more_than_text_are_as_complete(app: App, more: dict[str, Any]) -> None:
    with open_client(app.url) as client:
        chunks = list(client.completions.create(**body("tell me", 30, **more), stream=True))
        options = {key: value for key, value in more.items() if key != "stream_options"}
        whole = client.completions.create(**body("tell me", 30, **options))
    texts = [""] * len(whole.choices)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


class Reader:
    """A client that reads when the test says so, with as little buffering as the kernel allows."""

    def __init__(self, url: str, request: dict[str, Any]) -> None:
        parts = urlsplit(url)
        content = json.dumps(request).encode()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(60)
        self.socket.connect((parts.hostname, parts.port))
        self.socket.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode()
            + content
        )

    def read_all(self) -> bytes:
        received = bytearray()
        with self.socket:
            while piece := self.socket.recv(1 << 20):
                received += piece
        return bytes(received)


# More than all buffers between the ingress and a client can hold.
CHOICES = 16
LARGE = {
    "model": MODEL,
    "prompt": "much",
    "n": CHOICES,
    "max_tokens": 4000,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 20,
}


def ingress_rss(app: App) -> int:
    (ingress,) = app.named("ServeReplica:sluice:ingress")
    rss: int = ingress.memory_info().rss
    return rss


def test_a_reader_that_pauses_gets_everything_later(app: App) -> None:
    reader = Reader(app.url, LARGE)
    first = reader.socket.recv(1)
    time.sleep(SLOW_READER_S / 2)
    answer = first + reader.read_all()
    assert answer.startswith(b"HTTP/1.1 200")
    # Transfer encoding may cut events anywhere, but nothing of them is lost.
    assert b"data: [DONE]" in answer
    assert answer.count(b'"finish_reason":"length"') == CHOICES
    assert len(answer) > 20 << 20


def test_a_reader_that_stops_is_cancelled_and_delays_nobody(app: App) -> None:
    before = total(scrape(), "ray_sluice_slow_readers_total")
    rss = ingress_rss(app)
    highest = rss
    reader = Reader(app.url, LARGE)
    reader.socket.recv(1)
    done = threading.Event()

    def others() -> None:
        with open_client(app.url) as client:
            while not done.is_set():
                chunks = list(client.completions.create(**body("quick", 20), stream=True))
                assert chunks[-1].choices[0].finish_reason == "length"

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(others)
        try:

            def counted() -> bool:
                nonlocal highest
                highest = max(highest, ingress_rss(app))
                assert not other.done(), other.exception()
                return total(scrape(), "ray_sluice_slow_readers_total") == before + 1

            wait_for("the slow reader is counted", counted, timeout_s=120, every_s=0.5)
        finally:
            done.set()
            reader.socket.close()
        other.result(timeout=60)
    # The answer is larger than that by far.
    assert highest - rss < 16 << 20
