"""The simulated GPU under plain vLLM: its real server, its real engine."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine import core as vllm_core
from vllm.v1.request import Request

from app.engine.simulated import SimulatedExecutor, simulated_engine_args
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


def test_min_tokens_outlast_a_grammar_that_could_end(server: Server) -> None:
    fields = {"structured_outputs": {"regex": "[a-z ]*"}}
    assert server.complete("x", max_tokens=30, extra_body=fields).usage.completion_tokens == 1
    answer = server.complete("x", max_tokens=30, extra_body={**fields, "min_tokens": 12})
    assert answer.usage.completion_tokens == 13
    assert answer.choices[0].finish_reason == "stop"


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

    top = server.complete("a b c", max_tokens=3, logprobs=2).choices[0].logprobs.top_logprobs
    assert [sorted(entry.values()) for entry in top] == [[-9999.0, 0.0]] * 3

    named = server.complete("a b c", max_tokens=1, logprobs=0, extra_body={"logprob_token_ids": [500, 501]})
    assert sorted(named.choices[0].logprobs.top_logprobs[0].values()) == [-9999.0, -9999.0, 0.0]

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


def test_plain_vllm_can_use_the_deadline_scheduler(server: Server, tmp_path: Path) -> None:
    settings = {"sluice_scheduler": {"default_tpot_ms": 100}}
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    prompts = [f"{index} " + "word " * (20 + 400 * index) for index in range(5)]
    xargs: list[dict[str, Any] | None] = [{"ttft_target_ms": 500, "tpot_target_ms": 50, "service_class": "chat"}, None]

    def answers(plain: Server) -> dict[int, str]:
        texts: dict[int, str] = {}

        def ask(index: int) -> None:
            extra = {"vllm_xargs": targets} if (targets := xargs[index % 2]) else {}
            texts[index] = plain.complete(prompts[index], max_tokens=50, extra_body=extra).choices[0].text

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return texts

    with vllm_server(
        tmp_path / "deadline.log",
        *("--scheduler-cls", "app.engine.scheduler.DeadlineScheduler", "--additional-config", json.dumps(settings)),
    ) as deadline:
        assert len(answers(server)) == len(prompts)
        assert answers(deadline) == answers(server)
        answer = deadline.client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=100,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
            extra_body={"vllm_xargs": xargs[0]},
        )
        assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)
        test_a_client_that_leaves_frees_the_engine(deadline)


def test_what_is_not_simulated_is_refused_at_start(tmp_path: Path) -> None:
    log = tmp_path / "refused.log"
    with pytest.raises(AssertionError), vllm_server(log, "--enable-lora"):
        pass
    assert "The simulated GPU does not support LoRA; switch it off or use a real executor." in log.read_text()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds engine cores in this process, without the lasting marks that vLLM's leave on one."""
    monkeypatch.setattr(vllm_core, "enable_envs_cache", lambda: None)
    monkeypatch.setattr(vllm_core, "freeze_gc_heap", lambda: None)

    def build(is_asynchronous: bool = False, **fields: Any) -> Any:
        return vllm_core.EngineCore(vllm_config(is_asynchronous, **fields), SimulatedExecutor, log_stats=True)

    return build


def vllm_config(is_asynchronous: bool = False, **fields: Any) -> Any:
    args = {
        "model": str(tokenizer_folder()), "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512,
        **simulated_engine_args("h100-llama-3.1-8b", 0.02), **fields,
    }  # fmt: skip
    config = AsyncEngineArgs(**args).create_engine_config()
    # The CPU build switches it off on the way; on a GPU machine it is the default.
    config.scheduler_config.async_scheduling = is_asynchronous
    return config


def answers(core: Any) -> dict[str, list[int]]:
    """The tokens of six requests that run together."""
    tokens: dict[str, list[int]] = {}
    for index in range(6):
        request = Request(
            request_id=f"r{index}",
            prompt_token_ids=[1000 + index] * 200,
            sampling_params=SamplingParams(max_tokens=200, ignore_eos=True),
            pooling_params=None,
            block_hasher=core.request_block_hasher,
        )
        tokens[request.request_id] = []
        core.add_request(request)
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_fn()
        for output in [each for some in (outputs or {}).values() for each in some.outputs]:
            tokens[output.request_id] += output.new_token_ids
    return tokens


@pytest.mark.parametrize("blocks", [None, 60])
def test_asynchronous_scheduling_changes_no_answer(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, blocks: int | None
) -> None:
    undisturbed = answers(engine())
    core = engine(is_asynchronous=True, num_gpu_blocks_override=blocks)
    preempted: list[str] = []
    preempt = core.scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(core.scheduler, "_preempt_request", note)
    assert core.batch_queue_size == 2
    assert answers(core) == undisturbed
    assert bool(preempted) == (blocks is not None)
    records = core.collective_rpc("sluice_step_records")[0]
    assert len(records) >= 200
    assert all(record["measured"] >= record["predicted"] for record in records)
    assert core.collective_rpc("sluice_step_records") == [[]]


@pytest.mark.parametrize("fields", [{}, {"hf_overrides": {}}])
def test_a_kv_cache_given_in_bytes_holds_the_profiles_tokens(
    engine: Callable[..., Any], fields: dict[str, Any]
) -> None:
    """Llama-3.1-8B takes 131,072 bytes per token, whatever shape the folder's own model has."""
    cache = engine(kv_cache_memory_bytes=1 << 30, **fields).vllm_config.cache_config
    assert cache.num_gpu_blocks * cache.block_size == 8192


def test_what_a_simulated_worker_cannot_do_is_an_error(engine: Callable[..., Any]) -> None:
    core = engine()
    with pytest.raises(NotImplementedError, match=r"does not have `save_sharded_state`"):
        core.collective_rpc("save_sharded_state")
    with pytest.raises(NotImplementedError, match=r"does not have `repr`"):
        core.collective_rpc(repr)
    core.reset_mm_cache()


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode raw_logits"),
        ({"runner": "pooling"}, "pooling models"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_is_not_simulated_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"The simulated GPU does not support {what}; switch it off"):
        SimulatedExecutor(vllm_config(**fields))
