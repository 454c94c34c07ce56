"""Applications that several test modules share. One Ray cluster runs at a time: two cores have no room for more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import ray
from ray import serve

from tests.support.otlp import Receiver, grpc_receiver
from tests.support.serving import CONFIGS, ROOT, open_client, running, url_of, variant, wait_ready

# Spans and metrics leave soon, so that a test that waits for them does not wait for a batch to fill.
_SOON = {"OTEL_BSP_SCHEDULE_DELAY": "200", "RAY_metrics_report_interval_ms": "1000"}


@dataclass(frozen=True)
class LocalApp:
    """The app as ./scripts/serve runs it, on the real model, with a receiver for its spans."""

    url: str
    receiver: Receiver
    # It does not retry, so that every answer is seen.
    client: openai.OpenAI
    model: str = "smollm2-135m-instruct"

    def unfinished(self) -> int:
        """Sequences that any engine still works on."""
        return sum(
            serve.get_deployment_handle(pool, "sluice").unfinished_requests.remote().result(timeout_s=30)
            for pool in ("interactive", "batch", "long_context")
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the shared app last: it stays up to the end, and others start or stop clusters of their own."""
    items.sort(key=lambda item: "local_app" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def local_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    """./scripts/serve with local.yaml, its spans sent to a receiver; this process joins its Ray cluster."""
    folder = tmp_path_factory.mktemp("local")
    with ExitStack() as stack:
        receiver = stack.enter_context(grpc_receiver())

        def change(document: dict[str, Any]) -> None:
            document["applications"][0]["args"]["tracing"] = {"exporter": "otlp", "endpoint": receiver.endpoint}

        config = variant(CONFIGS / "local.yaml", folder / "local.yaml", change)
        log = folder / "serve.log"
        command = [str(ROOT / "scripts" / "serve"), "--no-setup", str(config)]
        process = stack.enter_context(running(command, log, _SOON))
        wait_ready(url_of(config), lambda: process.poll() is None, log)
        # Only for a cluster that it finds by itself does Ray use the token that `serve run` has written.
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
        stack.callback(ray.shutdown)
        client = stack.enter_context(open_client(url_of(config)))
        yield LocalApp(url_of(config), receiver, client)
