"""What vLLM's own OpenAI server answers rightly, this app answers too; and a client's mistake is always a 4xx."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.model_cache import builtin_model_path
from tests.integration.conftest import LocalApp
from tests.integration.corpus import BAD, GOOD
from tests.support.serving import ROOT, free_port, get, running, wait_for

pytestmark = pytest.mark.integration

# What may differ: identities, moments, and what this app adds.
_OWN = {"id", "created", "system_fingerprint", "service_tier", "metrics", "prompt_tokens_details"}


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory, local_app: LocalApp) -> Iterator[str]:
    """vLLM's own OpenAI server on the same model, with the settings of the interactive pool but a longer context."""
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(builtin_model_path(local_app.model)),
        "--served-model-name", local_app.model,
        "--chat-template", str(ROOT / "app/engine/templates/smollm2-tools.jinja"),
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--max-model-len", "8192", "--max-num-seqs", "16", "--max-num-batched-tokens", "512",
        "--kv-cache-memory-bytes", str(384 << 20),
        "--distributed-executor-backend", "uni",
        "--enable-prompt-tokens-details", "--enforce-eager",
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    threads = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    with running(command, log, threads) as process:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return get(f"{url}/health")[0] == 200

        wait_for("vLLM's own server", ready, timeout_s=240, every_s=0.5)
        yield url


def send(url: str, path: str, model: str, body: dict[str, Any], stream: bool) -> httpx.Response:
    request = {
        "model": model,
        **{key: value for key, value in body.items() if value is not None or key in ("messages", "prompt")},
    }
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(request).encode("utf-8", "surrogatepass")
    return httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=120)


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items() if key not in _OWN and item is not None}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return value


def said(answer: httpx.Response) -> Any:
    """What a stream said: text and calls per choice, finish reasons, usage."""
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            calls = "".join(json.dumps(call.get("function")) for call in delta.get("tool_calls") or [])
            text = (choice.get("text") or delta.get("content") or "") + calls
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice.get("finish_reason"):
                reasons[choice["index"]] = choice["finish_reason"]
        if chunk.get("usage"):
            usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
    return texts, reasons, usage


@pytest.mark.parametrize(("name", "path", "body"), GOOD, ids=[f"{path[4:]} {name}" for name, path, _ in GOOD])
def test_good_requests(local_app: LocalApp, vllm_url: str, name: str, path: str, body: dict[str, Any]) -> None:
    theirs = send(vllm_url, path, local_app.model, body, stream=False)
    ours = send(local_app.url, path, local_app.model, body, stream=False)
    assert theirs.status_code == 200, theirs.text
    assert ours.status_code == 200, ours.text
    assert comparable(ours.json()) == comparable(theirs.json())

    theirs = send(vllm_url, path, local_app.model, body, stream=True)
    ours = send(local_app.url, path, local_app.model, body, stream=True)
    if theirs.status_code != 200:  # vLLM cannot stream everything
        assert ours.status_code == theirs.status_code
    else:
        assert said(ours) == said(theirs)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("status", "path", "body"),
    [(status, path, body) for status, (_, path, body) in BAD],
    ids=[f"{path[4:]} {name}" for _, (name, path, _) in BAD],
)
def test_bad_requests(local_app: LocalApp, status: int, path: str, body: dict[str, Any], stream: bool) -> None:
    if stream and "stream" in body:
        stream = False
    answer = send(local_app.url, path, local_app.model, body, stream)
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert error["message"]
    assert error["code"] == status
    assert len(answer.content) < 2000
