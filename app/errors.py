"""The one error tree. Whatever goes wrong with a request becomes one of these before it reaches the client.

ConfigError                      the configuration is wrong (never an answer to a request)
RequestError                     an HTTP status, an OpenAI error body and an outcome
├── InvalidRequest        400    the request cannot be served as it is
├── NotFound              404    no such route or model
├── MethodNotAllowed      405
├── BodyTooLarge          413
├── InvalidKey            401    no API key, or one that nobody has
├── NotAllowed            403    the API key may not ask for this
├── Gone                  410    the stream cannot be resumed
├── QuotaExceeded         429    the caller has had what it may have, or its own requests are in the way
├── Saturated             503    the request would be late: nothing that may serve it has room in time
├── HoldExpired           503    it was held for room, and there was none in time
├── PoolSaturated         503    the pool takes no more at present; retry after a while
├── PoolUnavailable       503    the pool has no replica that answers
├── ReplicaLost           503    the replica died with the request
├── AcceptTimeout         503    no replica accepted the request within the pool's accept_timeout_s
├── RequestCancelled      499    somebody cancelled the request by its id
└── InternalError         500    a fault of this server
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from app.types import Outcome

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")

# Until the time that a pool needs is known.
_RETRY_AFTER_S = 1.0


class ConfigError(ValueError):
    """The configuration is wrong. The message is one sentence that names the key and the fix."""


class RequestError(Exception):
    """A request that ends without the answer it asked for.

    `status`: HTTP status. `kind`: OpenAI's `type` of the error. `outcome`: how metrics and spans count it.
    `retryable`: the same request may succeed later or elsewhere. `retry_after`: seconds for `Retry-After`, which every
    retryable error has. `details`: more about it, for programs.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "InternalServerError"
    outcome: ClassVar[Outcome] = "failed"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details
        self.retry_after = _RETRY_AFTER_S if retry_after is None and self.retryable else retry_after

    @property
    def reason(self) -> str:
        """Why, in one word of a small vocabulary: what `details` say, else the error's name, `like_this`."""
        given = (self.details or {}).get("reason")
        return given if given is not None else _CAPITAL.sub("_", type(self).__name__).lower()

    def body(self) -> dict[str, Any]:
        """The error as OpenAI and vLLM write it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error if self.details is None else {**error, "details": self.details}}


class InvalidRequest(RequestError):
    """The request cannot be served as it is."""

    status = 400
    kind = "BadRequestError"
    outcome = "rejected"


class NotFound(RequestError):
    """No such route or model."""

    status = 404
    kind = "NotFoundError"
    outcome = "rejected"


class MethodNotAllowed(RequestError):
    """The route exists, the method does not."""

    status = 405
    kind = "MethodNotAllowed"
    outcome = "rejected"


class BodyTooLarge(RequestError):
    """The body exceeds `ingress.max_body_mib`."""

    status = 413
    kind = "RequestEntityTooLarge"
    outcome = "rejected"


class InvalidKey(RequestError):
    """No API key, or one that nobody has."""

    status = 401
    kind = "AuthenticationError"
    outcome = "rejected"


class NotAllowed(RequestError):
    """The API key may not ask for this."""

    status = 403
    kind = "PermissionDeniedError"
    outcome = "rejected"


class QuotaExceeded(RequestError):
    """The caller has had what it may have, or its own requests are in the way."""

    status = 429
    kind = "RateLimitError"
    outcome = "rejected"
    retryable = True


class Saturated(RequestError):
    """The request would be late: nothing that may serve it has room in time."""

    status = 503
    kind = "ServiceUnavailableError"
    outcome = "rejected"
    retryable = True


class HoldExpired(RequestError):
    """It was held for room, and there was none in time."""

    status = 503
    kind = "ServiceUnavailableError"
    retryable = True
    outcome = "evicted"


class Gone(RequestError):
    """The stream cannot be resumed: it is over for too long, or was never one that could."""

    status = 410
    kind = "GoneError"
    outcome = "rejected"


class RequestCancelled(RequestError):
    """Somebody cancelled the request by its id. 499 is what nginx has for it."""

    status = 499
    kind = "RequestCancelledError"
    outcome = "cancelled"


class PoolSaturated(RequestError):
    """The pool takes no more requests at present."""

    status = 503
    kind = "ServiceUnavailableError"
    outcome = "rejected"
    retryable = True


class PoolUnavailable(RequestError):
    """The pool has no replica that answers."""

    status = 503
    kind = "ServiceUnavailableError"
    outcome = "failed"
    retryable = True


class ReplicaLost(RequestError):
    """The replica, or its engine, died with the request."""

    status = 503
    kind = "ServiceUnavailableError"
    outcome = "failed"
    retryable = True


class AcceptTimeout(RequestError):
    """No replica accepted the request within the pool's `accept_timeout_s`."""

    status = 503
    kind = "ServiceUnavailableError"
    outcome = "evicted"
    retryable = True


class InternalError(RequestError):
    """A fault of this server."""


class EngineError(RequestError):
    """An error that vLLM's OpenAI layer gave and that none of the others stands for."""

    def __init__(self, status: int, kind: str, message: str, param: str | None) -> None:
        super().__init__(message, param=param, retry_after=_RETRY_AFTER_S if status == 503 else None)
        self.status = status  # type: ignore[misc]
        self.kind = kind  # type: ignore[misc]
        self.outcome = "rejected" if status < 500 or status == 503 else "failed"  # type: ignore[misc]
        self.retryable = status == 503  # type: ignore[misc]


def from_engine(status: int, kind: str, message: str, param: str | None) -> RequestError:
    """What vLLM's OpenAI layer says of a request, as one of these errors."""
    if status == InvalidRequest.status:
        return InvalidRequest(message, param=param)
    if status == NotFound.status:
        return NotFound(message, param=param)
    return EngineError(status, kind, message, param)
