"""API keys: whose a request is, and what that key may ask for. Pure: files and clocks are given.

A keys file is YAML:

    keys:
      - name: search-team                 # how metrics and logs call it
        sha256: 9f86d081884c7d65...       # of the key; `./scripts/hash-key` prints it
        classes: [interactive, batch]     # classes that it may ask for; left out: all
        requests_per_minute: 600
        tokens_per_minute: 1000000        # prompt plus output
        max_concurrent: 50
        weight: 2                         # its part of a class next to other keys'

Keys are kept as SHA-256 hashes, and every key is compared with every hash in constant time. A key needs to be long and
random (the hash is not salted); `./scripts/hash-key` makes such ones.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import Field, ValidationError, field_validator

from app.config import ConfigModel, Name, describe_validation_error
from app.errors import ConfigError, InvalidKey, NotAllowed, QuotaExceeded

_MINUTE_S = 60.0
_SHA256 = r"^[0-9a-f]{64}$"


class KeyConfig(ConfigModel):
    """One API key and what it may ask for."""

    name: str = Field(min_length=1, max_length=64, description="How metrics, spans and logs call it.")
    sha256: str = Field(pattern=_SHA256, description="SHA-256 of the key, in lower-case hexadecimal.")
    classes: tuple[Name, ...] | None = Field(None, description="Classes that it may ask for. Default: all.")
    requests_per_minute: float | None = Field(None, gt=0, description="Default: no limit.")
    tokens_per_minute: float | None = Field(
        None,
        gt=0,
        description="Prompt plus output tokens per minute; what a request may generate counts until it ends, "
        "then what it did. Default: no limit.",
    )
    max_concurrent: int | None = Field(None, ge=1, description="Requests at once. Default: no limit.")
    weight: float = Field(1.0, gt=0, description="Its part of a class, next to other keys'. Default: 1.")


class _KeysFile(ConfigModel):
    keys: tuple[KeyConfig, ...] = Field(description="All keys.")

    @field_validator("keys")
    @classmethod
    def _check_unique(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in keys]
            if len(set(values)) != len(values):
                raise ValueError(f"two keys have the same {what}")
        return keys


def parse_keys(document: object, where: str) -> tuple[KeyConfig, ...]:
    """The keys of a keys file's document.

    Raises:
        ConfigError: with one sentence naming the key and the fix; never a secret.
    """
    try:
        return _KeysFile.model_validate(document).keys
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_validation_error(error)}") from None


def keys_from_text(text: str) -> tuple[KeyConfig, ...]:
    """Keys without limits from `name=key` pairs, separated by commas, as an environment variable holds them.

    Raises:
        ConfigError: a pair is none.
    """
    keys = []
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, separator, secret = pair.partition("=")
        if not separator or not name or not secret:
            raise ConfigError("SLUICE_API_KEYS must be pairs name=key, separated by commas")
        keys.append(KeyConfig(name=name, sha256=hash_key(secret)))
    return tuple(keys)


def hash_key(secret: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(secret.encode()).hexdigest()


class _Bucket:
    """So much a minute, and a minute's worth at once (a token bucket). What was taken can be settled afterwards."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at: float | None = None

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken: 0 for now. More than the bucket holds needs it full."""
        self._fill(now)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: float) -> None:
        """Take it; what was taken too much is given back by a negative amount."""
        self._level -= amount

    def _fill(self, now: float) -> None:
        if self._at is not None:
            self._level += max(0.0, now - self._at) * self.per_minute / _MINUTE_S
        self._level = min(self._level, self.per_minute)
        self._at = now


@dataclass(slots=True)
class _Use:
    config: KeyConfig
    requests: _Bucket | None
    tokens: _Bucket | None
    concurrent: int = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose a request is. `name`: "" where keys are not asked for."""

    name: str = ""
    weight: float = 1.0
    classes: tuple[str, ...] | None = None


@dataclass(slots=True)
class Grant:
    """What a request took of its key's limits; to be given back by `Keys.release`."""

    caller: Caller
    tokens: int = 0
    released: bool = field(default=False)


class Keys:
    """All keys and what is used of them. With several ingress replicas, each has an equal part of every limit."""

    def __init__(self, keys: Iterable[KeyConfig], parts: int = 1) -> None:
        self._parts = parts
        self._uses: dict[str, _Use] = {}
        self.is_open = True
        self.configure(keys)

    def configure(self, keys: Iterable[KeyConfig] | None) -> None:
        """Have these keys from now on. What those that stay have used stays used. None: nobody needs a key."""
        before, self._uses = self._uses, {}
        self.is_open = keys is None
        for key in keys or ():
            known = before.get(key.name)
            requests = self._bucket(key.requests_per_minute, known.requests if known else None)
            tokens = self._bucket(key.tokens_per_minute, known.tokens if known else None)
            self._uses[key.name] = _Use(key, requests, tokens, known.concurrent if known else 0)

    def _bucket(self, per_minute: float | None, known: _Bucket | None) -> _Bucket | None:
        if per_minute is None:
            return None
        if known is not None and known.per_minute == per_minute / self._parts:
            return known
        return _Bucket(per_minute / self._parts)

    def identify(self, authorization: str | None) -> Caller:
        """Whose key an `Authorization` header carries.

        Raises:
            InvalidKey: nobody's.
        """
        if self.is_open:
            return Caller()
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hash_key(secret.strip())
        found: KeyConfig | None = None
        for use in self._uses.values():
            # All are compared, so that the time tells nothing.
            if hmac.compare_digest(use.config.sha256, digest):
                found = use.config
        if scheme.lower() != "bearer" or not secret or found is None:
            missing = "none was given" if not authorization else "the one given is not known"
            raise InvalidKey(f"An API key is needed, as `Authorization: Bearer KEY`; {missing}.")
        return Caller(found.name, found.weight, found.classes)

    def check_class(self, caller: Caller, service_class: str) -> None:
        """Raises NotAllowed if the caller may not ask for the class."""
        if caller.classes is not None and service_class not in caller.classes:
            names = ", ".join(f"`{name}`" for name in caller.classes)
            raise NotAllowed(f"Your API key may not ask for class `{service_class}`; it may for {names}.")

    def take(self, caller: Caller, tokens: int, now: float) -> Grant:
        """Count one more request of so many tokens, prompt and most output.

        Raises:
            QuotaExceeded: the key has had what it may have.
        """
        use = self._uses.get(caller.name)
        if use is None:
            return Grant(caller)
        config = use.config
        if config.max_concurrent is not None:
            most = max(1, round(config.max_concurrent / self._parts))
            if use.concurrent >= most:
                raise _exceeded(f"{config.max_concurrent} requests at once", "concurrent_requests", 1.0)
        if use.requests is not None and (wait := use.requests.wait_s(1, now)):
            raise _exceeded(f"{config.requests_per_minute:g} requests per minute", "requests_per_minute", wait)
        if use.tokens is not None and (wait := use.tokens.wait_s(tokens, now)):
            raise _exceeded(f"{config.tokens_per_minute:g} tokens per minute", "tokens_per_minute", wait)
        if use.requests is not None:
            use.requests.take(1)
        if use.tokens is not None:
            use.tokens.take(tokens)
        use.concurrent += 1
        return Grant(caller, tokens)

    def release(self, grant: Grant, used_tokens: int) -> None:
        """The request ended and used so many tokens; harmless when it has before."""
        use = self._uses.get(grant.caller.name)
        if grant.released or use is None:
            return
        grant.released = True
        use.concurrent = max(0, use.concurrent - 1)
        if use.tokens is not None:
            use.tokens.take(used_tokens - grant.tokens)


def _exceeded(what: str, reason: str, wait_s: float) -> QuotaExceeded:
    return QuotaExceeded(f"Your API key may have {what}; please wait.", retry_after=wait_s, details={"reason": reason})
