"""Which class a request has and which pool is its home. Pure functions of the configuration and the request."""

from __future__ import annotations

from collections.abc import Mapping

from app.config import PoolConfig, RoutingConfig, ServiceClassConfig, SluiceConfig
from app.errors import InvalidRequest

# OpenAI's values of `service_tier`. `auto` leaves the choice to the server, `scale` is bought capacity, which this
# server serves as its default tier.
_TIERS = {"auto": None, "default": "default", "flex": "flex", "priority": "priority", "scale": "default"}


def classify(classes: Mapping[str, ServiceClassConfig], service_tier: object, x_priority: str | None) -> str:
    """The service class a request asks for.

    A `service_tier` other than `auto` decides; else the `x-priority` header (a class's name or a tier); else the class
    of the default tier. `priority` and `flex` fall back to the default tier where no class has them.

    Raises:
        InvalidRequest: the tier or the header names nothing known.
    """
    by_tier = {entry.service_tier: name for name, entry in classes.items()}
    if service_tier is not None:
        if not isinstance(service_tier, str) or service_tier not in _TIERS:
            raise InvalidRequest(
                f"service_tier must be one of {_quoted(_TIERS)}, not {_shown(service_tier)}.", param="service_tier"
            )
        tier = _TIERS[service_tier]
        if tier is not None:
            return by_tier.get(tier, by_tier["default"])  # type: ignore[call-overload, no-any-return]
    if x_priority is not None:
        wanted = x_priority.strip().lower()
        if wanted in classes:
            return wanted
        if wanted in _TIERS:
            return by_tier.get(_TIERS[wanted] or "default", by_tier["default"])  # type: ignore[call-overload, no-any-return]
        raise InvalidRequest(
            f"x-priority must be a class ({_quoted(classes)}) or a service tier ({_quoted(_TIERS)}), "
            f"not {_shown(x_priority)}."
        )
    return by_tier["default"]


def length_class(routing: RoutingConfig, prompt_tokens: int) -> str:
    """The length class of a prompt of `prompt_tokens` tokens."""
    for length in routing.lengths:
        if length.max_prompt_tokens is None or prompt_tokens <= length.max_prompt_tokens:
            return length.name
    raise AssertionError("the last length class has no bound")


def pools_for(
    config: SluiceConfig, service_class: str, prompt_tokens: int, max_output_tokens: int | None
) -> tuple[str, ...]:
    """Where a request may be served: its home pool first, then those that may help out.

    Raises:
        InvalidRequest: no pool that the rules name for it can hold the context.
    """
    home = home_pool(config.routing, config.pools, service_class, prompt_tokens, max_output_tokens)
    if not config.routing.spillover:
        return (home,)
    allowed = config.classes[service_class].spill_to
    context_tokens = prompt_tokens + (1 if max_output_tokens is None else max_output_tokens)
    others = [
        name
        for name, pool in config.pools.items()
        if name != home and (allowed is None or name in allowed) and context_tokens <= pool.engine.max_model_len
    ]
    return (home, *others)


def longest_context(config: SluiceConfig, service_class: str) -> int:
    """The longest context, in tokens, of the pools that the rules name for a class."""
    return max(
        config.pools[rule.pool].engine.max_model_len
        for rule in config.routing.rules
        if rule.service_class in (None, service_class)
    )


def home_pool(
    routing: RoutingConfig,
    pools: Mapping[str, PoolConfig],
    service_class: str,
    prompt_tokens: int,
    max_output_tokens: int | None,
) -> str:
    """The first pool in the rule table that matches and whose `max_model_len` holds prompt and output.

    `max_output_tokens`: what the request asked for; None where it left the length to the server, for which one token
    of room is enough.

    Raises:
        InvalidRequest: no matching pool can hold the context.
    """
    length = length_class(routing, prompt_tokens)
    context_tokens = prompt_tokens + (1 if max_output_tokens is None else max_output_tokens)
    matching = [
        rule.pool
        for rule in routing.rules
        if rule.service_class in (None, service_class) and rule.length in (None, length)
    ]
    for pool in matching:
        if context_tokens <= pools[pool].engine.max_model_len:
            return pool
    longest = max(pools[pool].engine.max_model_len for pool in matching)
    output = "" if max_output_tokens is None else f" and {max_output_tokens} output tokens"
    raise InvalidRequest(
        f"The prompt of {prompt_tokens} tokens{output} exceeds the context of {longest} tokens that requests of class "
        f"`{service_class}` may use.",
        param="messages" if max_output_tokens is None else "max_tokens",
    )


def _quoted(names: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shown(value: object) -> str:
    return f"`{str(value)[:64]}`"
