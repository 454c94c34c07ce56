"""The simulated GPU under plain vLLM: its real server, its real engine."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.models import llama_shape, tokenizer_folder
from tests.support.serving import free_port, get, open_client, running, wait_for

pytestmark = pytest.mark.integration


class Server:
    """vLLM's own server on a simulated GPU."""

    def __init__(self, url: str, client: openai.OpenAI) -> None:
        self.url = url
        self.client = client

    def complete(self, prompt: str, **fields: Any) -> Any:
        return self.client.completions.create(model="m", prompt=prompt, **fields)

    def metric(self, name: str) -> float:
        text = get(f"{self.url}/metrics")[1].decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return sum(sample.value for sample in families[name].samples if not sample.name.endswith("_created"))


@contextmanager
def vllm_server(log: Path, *options: str) -> Iterator[Server]:
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(tokenizer_folder()), "--served-model-name", "m", "--hf-overrides", llama_shape(),
        "--distributed-executor-backend", "app.engine.simulated.SimulatedExecutor",
        "--max-model-len", "32768", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048",
        "--block-size", "16", "--enforce-eager", "--enable-prompt-tokens-details",
        "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    with running(command, log) as process:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return get(f"{url}/health")[0] == 200

        wait_for("vLLM's server", ready, timeout_s=240, every_s=0.5)
        with open_client(url) as client:
            yield Server(url, client)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("simulated")
    with vllm_server(folder / "vllm.log") as server:
        yield server


def test_the_kv_cache_holds_what_the_profile_says(server: Server) -> None:
    text = get(f"{server.url}/metrics")[1].decode()
    (config,) = [family for family in text_string_to_metric_families(text) if family.name == "vllm:cache_config_info"]
    labels = config.samples[0].labels
    assert int(labels["num_gpu_blocks"]) * int(labels["block_size"]) == pytest.approx(448_000, rel=0.001)


def test_answers_are_as_long_as_asked_and_repeatable(server: Server) -> None:
    first = server.complete("One two three", max_tokens=40)
    assert first.usage.completion_tokens == 40
    assert first.choices[0].finish_reason == "length"
    assert len(first.choices[0].text.split()) > 10
    assert server.complete("One two three", max_tokens=40).choices[0].text == first.choices[0].text
    chunks = server.complete("One two three", max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == first.choices[0].text


def test_prefixes_are_cached(server: Server) -> None:
    prompt = "A prefix that nobody else uses. " * 40
    server.complete(prompt, max_tokens=1)
    usage = server.complete(prompt, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 16


def test_structured_output_validates(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "count": {"type": "integer"},
            "names": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2},
            "kind": {"enum": ["a", "b"]},
        },
        "required": ["ok", "count", "names", "kind"],
        "additionalProperties": False,
    }
    answer = server.client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"ok", "count", "names", "kind"}
    assert isinstance(value["ok"], bool)
    assert isinstance(value["count"], int)
    assert len(value["names"]) >= 2
    assert all(len(name) >= 2 for name in value["names"])
    assert value["kind"] in ("a", "b")


def test_logprobs_of_answer_and_prompt(server: Server) -> None:
    chat = server.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert [entry.logprob for entry in content] == [0.0, 0.0, 0.0]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[0.0, -9999.0]] * 3

    choice = server.complete("a b c", max_tokens=3, extra_body={"prompt_logprobs": 0}).choices[0]
    first, *rest = choice.prompt_logprobs
    assert first is None
    assert all(next(iter(entry.values()))["logprob"] == 0.0 for entry in rest)


def test_a_client_that_leaves_frees_the_engine(server: Server) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_bytes())
        wait_for("a running request", lambda: server.metric("vllm:num_requests_running") == 1, timeout_s=10)
    wait_for("an idle engine", lambda: server.metric("vllm:num_requests_running") == 0, timeout_s=10)


def test_preempted_requests_say_the_same(server: Server, tmp_path: Path) -> None:
    prompts = [f"{index} " + "word " * 200 for index in range(6)]
    undisturbed = [server.complete(prompt, max_tokens=300).choices[0].text for prompt in prompts]
    # Room for two and a half of the six, so that running requests lose their KV cache.
    with vllm_server(tmp_path / "small.log", "--num-gpu-blocks-override", "80", "--max-model-len", "1024") as small:
        texts: dict[int, str] = {}

        def ask(index: int) -> None:
            texts[index] = small.complete(prompts[index], max_tokens=300).choices[0].text

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [texts[index] for index in range(len(prompts))] == undisturbed
        assert small.metric("vllm:num_preemptions") > 0


def test_what_is_not_simulated_is_refused_at_start(tmp_path: Path) -> None:
    log = tmp_path / "refused.log"
    with pytest.raises(AssertionError), vllm_server(log, "--enable-lora"):
        pass
    assert "The simulated GPU does not support LoRA; switch it off or use a real executor." in log.read_text()
