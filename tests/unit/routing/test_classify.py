"""Classification and mapping as a table: what a request says, and where it goes."""

import pytest

from app.config import (
    CpuExecutor,
    EngineConfig,
    LengthConfig,
    PoolConfig,
    RoutingConfig,
    RuleConfig,
    ServiceClassConfig,
)
from app.errors import InvalidRequest
from app.routing.classify import classify, home_pool, length_class

CLASSES = {
    "interactive": ServiceClassConfig(service_tier="priority"),
    "standard": ServiceClassConfig(service_tier="default"),
    "batch": ServiceClassConfig(service_tier="flex"),
}


def pool(max_model_len: int) -> PoolConfig:
    return PoolConfig(
        executor=CpuExecutor(kind="cpu"), engine=EngineConfig(max_model_len=max_model_len, kv_cache_memory_mib=64)
    )


POOLS = {"interactive": pool(2048), "batch": pool(4096), "long_context": pool(8192)}
ROUTING = RoutingConfig(
    lengths=(LengthConfig(name="short", max_prompt_tokens=1000), LengthConfig(name="long")),
    rules=(
        RuleConfig(service_class="batch", length="short", pool="batch"),
        RuleConfig(length="short", pool="interactive"),
        RuleConfig(pool="long_context"),
    ),
)


@pytest.mark.parametrize(
    ("service_tier", "x_priority", "expected"),
    [
        (None, None, "standard"),
        ("auto", None, "standard"),
        ("default", None, "standard"),
        ("scale", None, "standard"),
        ("priority", None, "interactive"),
        ("flex", None, "batch"),
        (None, "batch", "batch"),
        (None, "flex", "batch"),
        (None, " Interactive ", "interactive"),
        (None, "auto", "standard"),
        ("auto", "interactive", "interactive"),
        ("flex", "interactive", "batch"),
        ("default", "batch", "standard"),
    ],
)
def test_class_of_a_request(service_tier: str | None, x_priority: str | None, expected: str) -> None:
    assert classify(CLASSES, service_tier, x_priority) == expected


@pytest.mark.parametrize("service_tier", ["priority", "flex"])
def test_a_tier_that_no_class_has_is_served_as_the_default(service_tier: str) -> None:
    assert classify({"only": ServiceClassConfig(service_tier="default")}, service_tier, None) == "only"


@pytest.mark.parametrize("service_tier", ["gold", "", 3, ["flex"], {"a": 1}, True])
def test_an_unknown_tier_is_refused_by_name(service_tier: object) -> None:
    with pytest.raises(InvalidRequest, match="service_tier must be one of") as caught:
        classify(CLASSES, service_tier, None)
    assert caught.value.param == "service_tier"


def test_an_unknown_priority_header_is_refused_and_not_repeated_at_length() -> None:
    with pytest.raises(InvalidRequest, match="x-priority must be") as caught:
        classify(CLASSES, None, "x" * 10_000)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"), [(1, "short"), (1000, "short"), (1001, "long"), (10**6, "long")]
)
def test_length_of_a_prompt(prompt_tokens: int, expected: str) -> None:
    assert length_class(ROUTING, prompt_tokens) == expected


@pytest.mark.parametrize(
    ("service_class", "prompt_tokens", "max_output_tokens", "expected"),
    [
        ("interactive", 10, None, "interactive"),
        ("standard", 1000, 1048, "interactive"),
        ("standard", 1000, 1049, "long_context"),  # does not fit its first choice
        ("batch", 10, 100, "batch"),
        ("batch", 10, 4090, "long_context"),  # fits neither batch nor interactive
        ("batch", 1001, 10, "long_context"),
        ("interactive", 5000, None, "long_context"),
        ("interactive", 8191, None, "long_context"),
    ],
)
def test_home_pool(service_class: str, prompt_tokens: int, max_output_tokens: int | None, expected: str) -> None:
    assert home_pool(ROUTING, POOLS, service_class, prompt_tokens, max_output_tokens) == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "max_output_tokens", "param"), [(8192, None, "messages"), (8000, 193, "max_tokens")]
)
def test_a_context_that_no_pool_holds_is_refused_with_the_counts(
    prompt_tokens: int, max_output_tokens: int | None, param: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt of {prompt_tokens} tokens.*8192") as caught:
        home_pool(ROUTING, POOLS, "standard", prompt_tokens, max_output_tokens)
    assert caught.value.param == param
