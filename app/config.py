"""The configuration of the app: the `args` of its entry in a Serve config file.

All models are frozen and refuse unknown keys. `parse_config` turns any mistake into one `ConfigError` whose message
names the key's path and what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.errors import ConfigError

NAME_PATTERN = r"^[a-z][a-z0-9_]{0,31}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
ServiceTier = Literal["priority", "default", "flex"]

_LEAST_ONGOING_REQUESTS = 256


class ConfigModel(BaseModel):
    """Base of every configuration model: immutable, unknown keys refused, defaults checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelConfig(ConfigModel):
    """Which model all pools serve."""

    name: str = Field(min_length=1, description="Name under which clients ask for the model (`model` in a request).")
    source: str = Field(
        min_length=1,
        description="Where the model is: a folder, a model id that vLLM can download, or `builtin:NAME` for a model "
        "that scripts/setup puts into the cache (`builtin:smollm2-135m-instruct`).",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model. Default: no.")
    chat_template: Path | None = Field(
        None,
        description="File with a Jinja chat template, or `builtin:NAME` for one in app/engine/templates. "
        "Default: the model's own.",
    )
    tool_call_parser: str | None = Field(
        None, description="vLLM's tool call parser (for example `hermes`). Without one, requests with tools get a 400."
    )
    reasoning_parser: str | None = Field(None, description="vLLM's reasoning parser. Default: none.")
    hf_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Values that replace those of the model's config.json."
    )


class EngineConfig(ConfigModel):
    """Tuning of one pool's vLLM engine."""

    max_model_len: int = Field(ge=16, description="Longest context, in tokens: prompt plus output.")
    max_num_seqs: int = Field(64, ge=1, description="Most sequences that one step may run. Default: 64.")
    max_num_batched_tokens: int = Field(
        2048, ge=16, description="Most tokens that one step may compute. Default: 2048."
    )
    kv_cache_memory_mib: int | None = Field(
        None,
        ge=1,
        description="Memory for the KV cache, in MiB. Default: what `gpu_memory_utilization` leaves (GPU), what the "
        "profile says (simulated); the CPU executor needs a value.",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory that the engine may use. Default: 0.9."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV cache of equal prompt prefixes. Default: yes.")
    scheduler: Literal["deadline", "vllm"] = Field(
        "deadline",
        description="`deadline` keeps the classes' targets; `vllm` is vLLM's own, which orders waiting requests by "
        "the same deadlines. Default: deadline.",
    )
    enforce_eager: bool = Field(False, description="Do not capture CUDA graphs or compile. Default: no.")
    dtype: str = Field("auto", description="Data type of weights and activations, as vLLM names it. Default: auto.")
    quantization: str | None = Field(None, description="vLLM's quantization method. Default: the model's own.")
    load_format: str = Field("auto", description="How weights are loaded; `dummy` for random ones. Default: auto.")
    compact_json: bool = Field(
        False,
        description="Structured output without optional white space, which small models fill JSON with until they run "
        "out of tokens. Default: no.",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of vLLM's AsyncEngineArgs, by vLLM's names. Unknown ones are refused.",
    )


class CpuExecutor(ConfigModel):
    """vLLM's CPU build."""

    kind: Literal["cpu"]
    threads: int = Field(1, ge=1, description="Threads that compute a step. Default: 1.")


class GpuExecutor(ConfigModel):
    """vLLM on CUDA GPUs."""

    kind: Literal["gpu"]
    tensor_parallel_size: int = Field(
        1, ge=1, description="GPUs that share one replica's model. Above 1, Ray places them by a placement group."
    )


class SimulatedExecutorConfig(ConfigModel):
    """vLLM's real engine with the model's execution replaced by a cost model of a GPU. No weights are loaded."""

    kind: Literal["simulated"]
    profile: str = Field(
        "h100-llama-3.1-8b", description="Name of a cost profile, or a YAML file with one. Default: h100-llama-3.1-8b."
    )
    time_scale: float = Field(
        1.0, gt=0, description="Real seconds per simulated second; above 1 slows the simulation down. Default: 1."
    )


Executor = Annotated[CpuExecutor | GpuExecutor | SimulatedExecutorConfig, Field(discriminator="kind")]


class PoolConfig(ConfigModel):
    """One pool: vLLM replicas of one shape, a Serve deployment."""

    executor: Executor = Field(description="What executes the model: `cpu`, `gpu` or `simulated`.")
    engine: EngineConfig = Field(description="Tuning of the pool's engines.")
    num_replicas: int = Field(
        1,
        ge=1,
        description="Replicas. Default: 1. For autoscaling, use `autoscaling_config` in the file's `deployments`.",
    )
    num_cpus: float = Field(1.0, ge=0, description="Ray CPUs that one replica reserves. Default: 1.")
    num_gpus: float = Field(
        0.0, ge=0, description="Ray GPUs that one replica reserves (tensor parallel: per GPU worker, 1). Default: 0."
    )
    accelerator_type: str | None = Field(None, description="Ray accelerator type, for example `H100`. Default: any.")
    resources: dict[str, float] = Field(default_factory=dict, description="Further Ray resources per replica.")
    placement_group_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "PACK", description="How the GPUs of a tensor-parallel replica are placed. Default: PACK."
    )
    max_ongoing_requests: int | None = Field(
        None,
        ge=1,
        description="Requests that one replica holds at once, running or waiting in its engine. Those with a target "
        "wait there for slots of those without one. Default: twice the engine's `max_num_seqs`, at least 256.",
    )
    max_queued_requests: int = Field(
        1024,
        ge=0,
        description="Requests that may wait, per ingress replica, for a replica to accept them; more are "
        "refused with 503. Default: 1024.",
    )
    accept_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait, in seconds, for a replica to accept a request. Default: 60."
    )
    graceful_shutdown_timeout_s: float = Field(
        120.0,
        ge=0,
        description="How long, in seconds, a replica that is stopped may finish its requests. Default: 120.",
    )

    reserve: dict[Name, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict,
        description="Share of each replica's `max_num_seqs` that is kept for a class: others leave it free. So a class "
        "that matters finds room, and a class that matters less is not starved. Default: none.",
    )

    @property
    def most_ongoing_requests(self) -> int:
        """Requests that one replica holds at once."""
        return self.max_ongoing_requests or max(_LEAST_ONGOING_REQUESTS, 2 * self.engine.max_num_seqs)

    @field_validator("reserve")
    @classmethod
    def _check_reserve(cls, reserve: dict[str, float]) -> dict[str, float]:
        if sum(reserve.values()) > 1:
            raise ValueError("the shares add up to more than 1; lower one")
        return reserve

    @model_validator(mode="after")
    def _check_executor(self) -> Self:
        if self.executor.kind == "cpu":
            if self.engine.kv_cache_memory_mib is None:
                raise ValueError(
                    "engine.kv_cache_memory_mib is needed with executor.kind: cpu; set it, for example 256"
                )
            if self.num_gpus:
                raise ValueError("num_gpus must be 0 with executor.kind: cpu")
        if self.executor.kind == "gpu" and not self.num_gpus:
            raise ValueError("num_gpus must be above 0 with executor.kind: gpu")
        return self


class TargetsConfig(ConfigModel):
    """What a class is promised. The engines' schedulers order and size their steps by it."""

    model_config = ConfigDict(allow_inf_nan=False)

    ttft_ms: float | None = Field(
        None,
        gt=0,
        description="Time from received to first token, in milliseconds, without what the prompt's length adds. "
        "Default: no target; such requests are served as others leave room, after 5 s before those that came later.",
    )
    ttft_ms_per_1k_tokens: float = Field(
        0.0, ge=0, description="What every 1,000 tokens of the prompt add to it, in milliseconds. Default: 0."
    )
    tpot_ms: float | None = Field(
        None,
        gt=0,
        description="Time per output token after the first, on average over an answer, in milliseconds. "
        "Default: no target.",
    )

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        if self.ttft_ms is None and self.ttft_ms_per_1k_tokens:
            raise ValueError("ttft_ms_per_1k_tokens needs ttft_ms; set it, for example 500")
        return self

    def ttft_s(self, prompt_tokens: int) -> float | None:
        """The TTFT target of a prompt of this length, in seconds; None without one."""
        if self.ttft_ms is None:
            return None
        return (self.ttft_ms + self.ttft_ms_per_1k_tokens * prompt_tokens / 1000) / 1000

    @property
    def tpot_s(self) -> float | None:
        """The TPOT target, in seconds; None without one."""
        return None if self.tpot_ms is None else self.tpot_ms / 1000


class DialsConfig(ConfigModel):
    """A class's trade between first tokens and throughput. A preset sets all dials; those that are given replace its.

    | preset | hold_ms | running_share | step_tpot_share | max_output_tokens |
    |---|---|---|---|---|
    | latency | 250 | 0.5 | 0.5 | 2048 |
    | balanced | 1000 | 1 | 1 | none |
    | throughput | 60000 | 1 | none | none |
    """

    preset: Literal["latency", "balanced", "throughput"] | None = Field(
        None, description="Default: balanced for classes with a TTFT target, throughput for those without."
    )
    hold_ms: float | None = Field(
        None,
        ge=0,
        description="Queue window: how long a request may be held for room, in milliseconds, before it is refused. "
        "Never beyond its TTFT target. Default: the preset's.",
    )
    running_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Concurrency ceiling: share of a replica's `max_num_seqs` that the class may have. Fewer sequences "
        "make shorter steps. Default: the preset's.",
    )
    step_tpot_share: float | Literal["none"] | None = Field(
        None,
        description="Step TPOT target: what the engine is told to keep, as a share of the class's TPOT target; lower "
        "makes steps shorter: faster tokens, less prefill. `none`: it isn't told any. Default: the preset's.",
    )
    max_output_tokens: int | Literal["none"] | None = Field(
        None, description="Output cap, in tokens per sequence; `none` for none. Default: the preset's."
    )

    @field_validator("step_tpot_share", "max_output_tokens")
    @classmethod
    def _check_positive(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, int | float) and value <= 0:
            raise ValueError("must be above 0, or `none`")
        return value


@dataclass(frozen=True, slots=True)
class Dials:
    """A class's dials, the preset's where none are given. None for no limit."""

    hold_s: float
    running_share: float
    step_tpot_share: float | None
    max_output_tokens: int | None


_PRESETS = {
    "latency": Dials(0.25, 0.5, 0.5, 2048),
    "balanced": Dials(1.0, 1.0, 1.0, None),
    "throughput": Dials(60.0, 1.0, None, None),
}


class ClassLimitsConfig(ConfigModel):
    """What one request, and all of a class together, may ask for."""

    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest prompt, in tokens; what happens to longer ones `long_prompts` says. Default: none.",
    )
    over_max_output: Literal["lower", "reject"] = Field(
        "lower",
        description="What happens to a request for more than the output cap: `lower` it, which the header "
        "`x-sluice-notes` tells, or `reject` it with 400. Default: lower.",
    )
    max_choices: int | None = Field(
        None, ge=1, description="Most sequences of one request (prompts times `n`). Default: ingress.max_choices."
    )
    max_concurrent: int | None = Field(
        None,
        ge=1,
        description="Requests of the class handled at once, held ones included; more get 429. Default: none.",
    )
    max_held: int = Field(
        512, ge=0, description="Requests of the class that may be held at once; more are refused. Default: 512."
    )


class LongPromptsConfig(ConfigModel):
    """What becomes of prompts that are longer than `limits.max_prompt_tokens`, or than the class's pools can hold."""

    mode: Literal["reject", "truncate", "retrieve", "summarize"] = Field(
        "reject",
        description="`reject` them with 400; or shorten them: `truncate` leaves out the middle, `retrieve` what is "
        "least relevant to the question, `summarize` puts summaries, made in the least important class, in the place "
        "of what is long. Instructions and the latest turns are kept. What was done is told in the header "
        "`x-sluice-notes`, in the span and in the usage. Default: reject.",
    )
    output_room: int = Field(
        512,
        ge=1,
        description="Tokens of the context that are left for the answer where a request doesn't say how many it wants. "
        "Default: 512.",
    )


class DegradeConfig(ConfigModel):
    """What a request gets instead of a refusal, step by step: a capped output, a shorter prompt, a lower class.

    Each step that was taken is named in the header `x-sluice-degraded` and in the span.
    """

    allowed: bool = Field(
        False,
        description="Degrade requests of the class without being asked; others are where their clients send "
        "`x-sluice-degrade: allow`. Default: no.",
    )
    max_output_tokens: int = Field(256, ge=1, description="First step: the output cap, in tokens. Default: 256.")
    prompt_share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Second step: the share of the prompt that is kept, as `long_prompts.mode` says, by retrieval if "
        "that is `reject`. Default: 0.25.",
    )
    min_prompt_tokens: int = Field(
        1024, ge=1, description="Prompts are not made shorter than this, in tokens. Default: 1024."
    )
    demote_to: Name | None = Field(
        None, description="Last step: the class that serves it. Default: the least important one."
    )


class ServiceClassConfig(ConfigModel):
    """One class of service. Its place in `classes` is its importance: the first is the most important."""

    service_tier: ServiceTier = Field(
        description="OpenAI's `service_tier` value that asks for this class, echoed in answers."
    )
    targets: TargetsConfig = Field(default_factory=TargetsConfig, description="Latency targets. Default: none.")
    dials: DialsConfig = Field(default_factory=DialsConfig, description="First token against throughput.")
    limits: ClassLimitsConfig = Field(default_factory=ClassLimitsConfig, description="Caps.")
    collect_ms: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="How long, in milliseconds, text of a stream is collected into one segment, after the first token. "
        "Larger segments cost less, for classes that nobody watches. Default: 0, what one engine step gives.",
    )
    long_prompts: LongPromptsConfig = Field(
        default_factory=LongPromptsConfig, description="What becomes of prompts that are too long. Default: rejected."
    )
    degrade: DegradeConfig = Field(
        default_factory=DegradeConfig, description="What requests get instead of a refusal. Default: nothing."
    )
    admit_share: float | None = Field(
        None,
        gt=0,
        description="A request is admitted if its predicted TTFT is at most this share of its target. Classes with "
        "lower shares are refused first; the rest of the target is for what predictions get wrong. Default: 0.8 for "
        "the first class, 0.15 less for each further one, at least 0.4.",
    )
    spill_to: tuple[Name, ...] | None = Field(
        None, description="Pools that may help out when the home pool is busy. Default: all; [] for none."
    )

    @property
    def effective_dials(self) -> Dials:
        """The dials, with the preset's values where none are given."""
        given = self.dials
        preset = _PRESETS[given.preset or ("throughput" if self.targets.ttft_ms is None else "balanced")]

        def chosen(value: Any, default: Any) -> Any:
            return default if value is None else None if value == "none" else value

        return Dials(
            preset.hold_s if given.hold_ms is None else given.hold_ms / 1000,
            preset.running_share if given.running_share is None else given.running_share,
            chosen(given.step_tpot_share, preset.step_tpot_share),
            chosen(given.max_output_tokens, preset.max_output_tokens),
        )


class LengthConfig(ConfigModel):
    """One length class: prompts up to a number of tokens."""

    name: Name = Field(description="Name of the length class.")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt of this class, in tokens; null for no limit (only in the last one)."
    )


class RuleConfig(ConfigModel):
    """One line of the rule table. The first that matches, and whose pool can hold the context, wins."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    service_class: Name | None = Field(None, alias="class", description="Service class; left out: any.")
    length: Name | None = Field(None, description="Length class; left out: any.")
    pool: Name = Field(description="Home pool.")


class RoutingConfig(ConfigModel):
    """How requests are mapped to pools."""

    lengths: tuple[LengthConfig, ...] = Field(min_length=1, description="Length classes, shortest first.")
    rules: tuple[RuleConfig, ...] = Field(min_length=1, description="Rule table, tried from the top.")
    spillover: bool = Field(True, description="Other pools help out when a request's home pool is busy. Default: yes.")
    admission: bool = Field(
        True,
        description="Requests that would be late are refused at once, and requests are held while there is no room. "
        "Without it all are dispatched as they come. Default: yes.",
    )

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, lengths: tuple[LengthConfig, ...]) -> tuple[LengthConfig, ...]:
        *bounded, last = lengths
        if last.max_prompt_tokens is not None:
            raise ValueError("the last length class must have no max_prompt_tokens, so that every prompt has a class")
        bounds = [length.max_prompt_tokens for length in bounded]
        numbers = [bound for bound in bounds if bound is not None]
        if len(numbers) != len(bounds) or numbers != sorted(set(numbers)):
            raise ValueError("max_prompt_tokens must rise from one length class to the next")
        if len({length.name for length in lengths}) != len(lengths):
            raise ValueError("two length classes have the same name")
        return lengths


class IngressConfig(ConfigModel):
    """The ingress deployment: CPU only, stateless."""

    num_replicas: int = Field(1, ge=1, description="Replicas. Default: 1.")
    num_cpus: float = Field(1.0, ge=0, description="Ray CPUs that one replica reserves. Default: 1.")
    max_ongoing_requests: int = Field(
        2048, ge=1, description="Requests that one ingress replica handles at once. Default: 2048."
    )
    max_body_mib: float = Field(
        16.0, gt=0, description="Largest request body, in MiB; larger ones get 413. Default: 16."
    )
    slow_reader_timeout_s: float = Field(
        60.0,
        gt=0,
        description="How long, in seconds, a client may leave a stream unread before its request is cancelled. "
        "Counted from when nothing more fits between here and the client. Default: 60.",
    )
    access_log: bool = Field(
        True,
        description="Write one line of JSON per request to Ray Serve's log, at INFO, without content. Default: yes.",
    )
    console: bool = Field(True, description="Serve the console at `/console`. Default: yes.")
    kept_requests: int = Field(
        2000,
        ge=0,
        description="How many of the last requests one ingress replica can tell about: `GET /v1/requests/{id}`. "
        "Each takes about 1 KiB. Default: 2000.",
    )
    resume_window_s: float = Field(
        30.0,
        gt=0,
        description="How long, in seconds, a stream that its client made resumable (`x-sluice-resume: allow`) goes on "
        "without a reader, and is kept after its end. Default: 30.",
    )
    resume_buffer_mib: float = Field(
        4.0, gt=0, description="What is kept of one such stream, in MiB; of longer ones the end. Default: 4."
    )
    max_choices: int = Field(
        32, ge=1, description="Most sequences that one request may ask for (prompts times `n`). Default: 32."
    )
    graceful_shutdown_timeout_s: float = Field(
        120.0,
        ge=0,
        description="How long, in seconds, a replica that is stopped may finish its requests. Default: 120.",
    )


class TracingConfig(ConfigModel):
    """Where spans go. What is left out here comes from the standard OTEL_ environment variables."""

    exporter: Literal["otlp", "console", "none"] | None = Field(
        None, description="Exporter. Default: OTEL_TRACES_EXPORTER, else `none`."
    )
    endpoint: str | None = Field(
        None, description="URL of the OTLP receiver. Default: OTEL_EXPORTER_OTLP_(TRACES_)ENDPOINT, else the SDK's."
    )
    protocol: Literal["grpc", "http/protobuf"] | None = Field(
        None, description="OTLP protocol. Default: OTEL_EXPORTER_OTLP_(TRACES_)PROTOCOL, else grpc."
    )
    sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of ordinary traces to keep where the caller has not decided; decided when a request has "
        "ended, so that those with errors, missed targets or refusals and the slowest of their class are always kept. "
        "Default: OTEL_TRACES_SAMPLER, which decides at the start, else 1.",
    )
    service_name: str | None = Field(None, description="Service name. Default: OTEL_SERVICE_NAME, else `sluice`.")


class OtlpMetricsConfig(ConfigModel):
    """Request metrics by OTLP, with exemplars, beside those that Ray exports. What is left out here comes from the
    standard OTEL_ environment variables."""

    exporter: Literal["otlp", "none"] | None = Field(
        None, description="Exporter. Default: OTEL_METRICS_EXPORTER, else `none`."
    )
    endpoint: str | None = Field(
        None, description="URL of the OTLP receiver. Default: OTEL_EXPORTER_OTLP_(METRICS_)ENDPOINT, else the SDK's."
    )
    protocol: Literal["grpc", "http/protobuf"] | None = Field(
        None, description="OTLP protocol. Default: OTEL_EXPORTER_OTLP_(METRICS_)PROTOCOL, else grpc."
    )
    interval_s: float = Field(15.0, gt=0, description="Time between exports, in seconds. Default: 15.")


class KeysConfig(ConfigModel):
    """API keys. Without any, nobody needs one, and the server is for this machine only."""

    file: Path | None = Field(
        None, description="YAML file with hashed keys and their limits, read again when it changes. Default: none."
    )
    environment: str = Field(
        "SLUICE_API_KEYS",
        min_length=1,
        description="Environment variable with keys without limits, as `name=key,name=key`. Default: SLUICE_API_KEYS.",
    )


class SluiceConfig(ConfigModel):
    """The whole configuration."""

    model: ModelConfig
    classes: dict[Name, ServiceClassConfig] = Field(
        default_factory=lambda: {
            "interactive": ServiceClassConfig(
                service_tier="priority", targets=TargetsConfig(ttft_ms=500, ttft_ms_per_1k_tokens=100, tpot_ms=50)
            ),
            "standard": ServiceClassConfig(
                service_tier="default", targets=TargetsConfig(ttft_ms=2000, ttft_ms_per_1k_tokens=300, tpot_ms=100)
            ),
            "batch": ServiceClassConfig(service_tier="flex"),
        },
        description="Classes of service, most important first. One of them has the `default` tier. Default: "
        "interactive (500 ms plus 100 ms per 1,000 prompt tokens, then 50 ms per token), standard (2 s plus 300 ms, "
        "100 ms) and batch (no targets).",
    )
    routing: RoutingConfig
    pools: dict[Name, PoolConfig] = Field(min_length=1, description="Pools by name.")
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    keys: KeysConfig = Field(default_factory=KeysConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    metrics: OtlpMetricsConfig = Field(default_factory=OtlpMetricsConfig)

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, classes: dict[str, ServiceClassConfig]) -> dict[str, ServiceClassConfig]:
        tiers = [entry.service_tier for entry in classes.values()]
        if len(set(tiers)) != len(tiers):
            raise ValueError("two classes have the same service_tier")
        if "default" not in tiers:
            raise ValueError("one class must have service_tier: default, for requests that ask for none")
        return classes

    @field_validator("pools")
    @classmethod
    def _check_pool_names(cls, pools: dict[str, PoolConfig]) -> dict[str, PoolConfig]:
        if "ingress" in pools:
            raise ValueError("a pool may not be called `ingress`: that is the name of the ingress deployment")
        return pools

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        lengths = [length.name for length in self.routing.lengths]
        for index, rule in enumerate(self.routing.rules):
            where = f"routing.rules.{index}"
            if rule.pool not in self.pools:
                raise ValueError(f"{where}.pool: no pool `{rule.pool}` is defined; defined are {_names(self.pools)}")
            if rule.service_class is not None and rule.service_class not in self.classes:
                raise ValueError(
                    f"{where}.class: no class `{rule.service_class}` is defined; defined are {_names(self.classes)}"
                )
            if rule.length is not None and rule.length not in lengths:
                raise ValueError(
                    f"{where}.length: no length class `{rule.length}` is defined; defined are {_names(lengths)}"
                )
        for name, pool in self.pools.items():
            for service_class in pool.reserve:
                if service_class not in self.classes:
                    raise ValueError(
                        f"pools.{name}.reserve: no class `{service_class}` is defined; defined are "
                        f"{_names(self.classes)}"
                    )
        for service_class, entry in self.classes.items():
            if entry.degrade.demote_to is not None and entry.degrade.demote_to not in self.classes:
                raise ValueError(
                    f"classes.{service_class}.degrade.demote_to: no class `{entry.degrade.demote_to}` is defined; "
                    f"defined are {_names(self.classes)}"
                )
            for pool_name in entry.spill_to or ():
                if pool_name not in self.pools:
                    raise ValueError(
                        f"classes.{service_class}.spill_to: no pool `{pool_name}` is defined; defined are "
                        f"{_names(self.pools)}"
                    )
        for service_class in self.classes:
            for length in lengths:
                if not any(
                    rule.service_class in (None, service_class) and rule.length in (None, length)
                    for rule in self.routing.rules
                ):
                    raise ValueError(
                        f"routing.rules: no rule matches class `{service_class}` with length `{length}`; add one"
                    )
        return self

    def admit_share(self, service_class: str) -> float:
        """Up to which share of its TTFT target a request of this class may be predicted to take."""
        given = self.classes[service_class].admit_share
        return max(0.4, 0.8 - 0.15 * list(self.classes).index(service_class)) if given is None else given


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def read_yaml(path: Path, what: str) -> Any:
    """The document in a YAML file; `what` it should be, for the message.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as a {what}: {' '.join(str(error).split())}") from None


def describe_validation_error(error: ValidationError) -> str:
    """The first mistake of a pydantic error as `path: what is wrong`, and how many more there are."""
    mistakes = error.errors(include_url=False, include_context=False)
    first = mistakes[0]
    location = [str(part) for part in first["loc"]]
    # After `executor` pydantic names the kind, which is not part of the file's path.
    path = ".".join(part for index, part in enumerate(location) if index == 0 or location[index - 1] != "executor")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key; remove it or correct its spelling"
    elif first["type"] == "missing":
        message = "this key is missing; add it"
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    return f"{path}: {message}{more}" if path else f"{message}{more}"


def parse_config(args: dict[str, Any]) -> SluiceConfig:
    """The configuration from a Serve application's `args`.

    Raises:
        ConfigError: with one sentence naming the key's path and the fix.
    """
    try:
        return SluiceConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError(f"args: {describe_validation_error(error)}") from None


# What can change while the app runs.
_DYNAMIC = ("classes", "routing")


def reconfigured(config: SluiceConfig, user_config: dict[str, Any]) -> SluiceConfig:
    """The configuration with the sections of a Serve deployment's `user_config` in place of its own.

    Raises:
        ConfigError: with one sentence naming the key's path and the fix.
    """
    for name in user_config:
        if name not in _DYNAMIC:
            allowed = " and ".join(f"`{section}`" for section in _DYNAMIC)
            raise ConfigError(
                f"user_config.{name}: only {allowed} can change while the app runs; change `args` instead"
            )
    try:
        return SluiceConfig.model_validate({**config.model_dump(), **user_config})
    except ValidationError as error:
        raise ConfigError(f"user_config: {describe_validation_error(error)}") from None
