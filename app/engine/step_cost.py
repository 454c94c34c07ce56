"""How long one engine step takes on a GPU: a cost model. Pure.

A step with D decodes, whose contexts hold `ctx` tokens together, and chunks of prefill, each of c tokens at depth d
(tokens of the same prompt before it), takes

    t = [ (W / (e_w BW))^x + (2 (P (D + c) + lm D') / (e_g F))^x ]^(1/x)      linear layers: weights read, or computed
        + 4 h L (c d + c^2 / 2) / (e_a F)                                     attention of the prefill
        + kv ctx / (e_k BW)                                                   KV cache read by the decodes
        + t_0 + t_1 D                                                         launching, and per sequence

D' counts the sequences that get a token: the decodes, and each prefill that ends in this step. The symbols are the
fields of `CostProfile`, which name their units and sources. Against published measurements of vLLM's decode steps it
is within 3 %, against TensorRT-LLM's throughput within -13 to +19 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.config import describe_validation_error, read_yaml
from app.errors import ConfigError


class CostProfile(BaseModel):
    """A model on a GPU, as far as the time of a step depends on it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    linear_parameters: float = Field(
        gt=0, description="P: parameters of the linear layers, without the lm_head. Source: the model's config.json."
    )
    lm_head_parameters: float = Field(
        gt=0, description="lm: parameters of the lm_head, vocabulary times hidden size. Source: config.json."
    )
    weight_bytes: float = Field(
        gt=0, description="W: bytes of weights read per step; the embedding table isn't. Source: (P + lm) times width."
    )
    kv_bytes_per_token: int = Field(
        gt=0,
        description="kv: bytes of KV cache per token, over all layers. Source: 2 * layers * KV heads * head * width.",
    )
    layers: int = Field(gt=0, description="L: layers. Source: config.json.")
    attention_width: int = Field(gt=0, description="h: attention heads times head size. Source: config.json.")
    bandwidth: float = Field(gt=0, description="BW: memory bandwidth, bytes/s. Source: the GPU's data sheet.")
    flops: float = Field(
        gt=0, description="F: dense peak at the weights' precision, FLOP/s. Source: the GPU's data sheet."
    )
    weight_read_efficiency: float = Field(
        0.77, gt=0, le=1, description="e_w: share of BW when reading weights. Source: Vidur's H100 kernel profiles."
    )
    gemm_efficiency: float = Field(
        0.65, gt=0, le=1, description="e_g: share of F in linear layers. Source: Vidur's H100 kernel profiles."
    )
    attention_efficiency: float = Field(
        0.5, gt=0, le=1, description="e_a: share of F in the prefill's attention. Source: an estimate."
    )
    kv_read_efficiency: float = Field(
        0.75, gt=0, le=1, description="e_k: share of BW when reading the KV cache. Source: an estimate."
    )
    overlap_exponent: float = Field(
        1.5,
        ge=1,
        description="x: 1 adds reading and computing up, infinity overlaps them. Source: Vidur's H100 kernel profiles.",
    )
    seconds_per_step: float = Field(0.5e-3, ge=0, description="t_0: fixed, seconds. Source: an estimate.")
    seconds_per_sequence: float = Field(4.4e-6, ge=0, description="t_1: per decode, seconds. Source: BLIS.")
    kv_capacity_tokens: int = Field(
        gt=0,
        description="Tokens that the KV cache holds. Source: what weights and activations leave of 0.9 of the memory.",
    )
    hf_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="The model's shape, as its config.json says it; replaces the tokenizer folder's.",
    )


_LLAMA_3_1_8B: dict[str, Any] = {
    "linear_parameters": 6.98e9,
    "lm_head_parameters": 0.525e9,
    "weight_bytes": 15.0e9,
    "kv_bytes_per_token": 131_072,
    "layers": 32,
    "attention_width": 4096,
    "hf_overrides": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
    },
}

PROFILES = {
    "h100-llama-3.1-8b": CostProfile(**_LLAMA_3_1_8B, bandwidth=3.35e12, flops=989e12, kv_capacity_tokens=448_000),
    "h200-llama-3.1-8b": CostProfile(**_LLAMA_3_1_8B, bandwidth=4.8e12, flops=989e12, kv_capacity_tokens=890_000),
}


def load_profile(name: str) -> CostProfile:
    """The named profile, or the one in a YAML file.

    Raises:
        ConfigError: there is no such profile or file, or the file is not a profile.
    """
    if name in PROFILES:
        return PROFILES[name]
    try:
        document = read_yaml(Path(name), "cost profile")
    except FileNotFoundError:
        known = ", ".join(f"`{profile}`" for profile in PROFILES)
        raise ConfigError(f"cost profile `{name}` is neither a file nor one of {known}") from None
    return parse_profile(document, name)


def parse_profile(document: Any, where: str) -> CostProfile:
    """The profile that a mapping of `CostProfile`'s fields describes; `where` it stands, for the message.

    Raises:
        ConfigError: it is not one.
    """
    try:
        return CostProfile.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_validation_error(error)}") from None


def step_seconds(
    profile: CostProfile,
    decodes: int,
    decode_context_tokens: int,
    prefills: Iterable[tuple[int, int]] = (),
    finishing_prefills: int = 0,
) -> float:
    """Seconds of one step.

    `decodes`: sequences that decode one token; `decode_context_tokens`: the tokens in their KV caches, together;
    `prefills`: (tokens of the chunk, tokens of its prompt before it); `finishing_prefills`: how many of these chunks
    end their prompt and so get a token.
    """
    chunk_tokens = 0
    attended = 0.0
    for chunk, depth in prefills:
        chunk_tokens += chunk
        attended += chunk * depth + chunk * chunk / 2
    exponent = profile.overlap_exponent
    read = profile.weight_bytes / (profile.weight_read_efficiency * profile.bandwidth)
    operations = 2 * (
        profile.linear_parameters * (decodes + chunk_tokens)
        + profile.lm_head_parameters * (decodes + finishing_prefills)
    )
    computed = operations / (profile.gemm_efficiency * profile.flops)
    attention = 4 * profile.attention_width * profile.layers * attended
    return float(
        (read**exponent + computed**exponent) ** (1 / exponent)
        + attention / (profile.attention_efficiency * profile.flops)
        + profile.kv_bytes_per_token * decode_context_tokens / (profile.kv_read_efficiency * profile.bandwidth)
        + profile.seconds_per_step
        + profile.seconds_per_sequence * decodes
    )
