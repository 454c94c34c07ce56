"""What one request may ask for, by its class. Pure."""

from __future__ import annotations

import dataclasses

from app.config import SluiceConfig
from app.errors import InvalidRequest
from app.types import JsonObject, Rendered, Route


def within_limits(
    config: SluiceConfig, route: Route, service_class: str, body: JsonObject, rendered: Rendered
) -> tuple[JsonObject, Rendered, list[str]]:
    """The request as its class allows it, and notes of what was changed for that.

    Raises:
        InvalidRequest: it asks for more than the class allows.
    """
    entry = config.classes[service_class]
    limits, cap = entry.limits, entry.effective_dials.max_output_tokens
    if limits.max_choices is not None and rendered.sequences > limits.max_choices:
        raise InvalidRequest(
            f"The request asks for {rendered.sequences} sequences (prompts times n); class `{service_class}` allows "
            f"at most {limits.max_choices}.",
            param="n",
        )
    asked = rendered.max_output_tokens
    if cap is None or (asked is not None and asked <= cap):
        return body, rendered, []
    if limits.over_max_output == "reject" and asked is not None:
        raise InvalidRequest(
            f"The request asks for up to {asked} output tokens; class `{service_class}` allows at most {cap}.",
            param="max_tokens",
        )
    notes = [] if asked is None else [f"max_tokens={cap}"]
    return with_output_cap(route, body, cap), dataclasses.replace(rendered, max_output_tokens=cap), notes


def with_output_cap(route: Route, body: JsonObject, tokens: int) -> JsonObject:
    """The request with that many output tokens at most."""
    named = "max_completion_tokens" if route == "chat" else "max_tokens"
    return {**{name: value for name, value in body.items() if name != "max_tokens"}, named: tokens}
