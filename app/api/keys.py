"""Where API keys come from: a file that is read again when it changes, and an environment variable."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from app.config import KeysConfig, read_yaml
from app.errors import ConfigError
from app.routing.keys import KeyConfig, Keys, keys_from_text, parse_keys

logger = logging.getLogger("ray.serve.sluice.ingress")

_LOOK_PERIOD_S = 1.0


def read_keys(config: KeysConfig, environment: Mapping[str, str] = os.environ) -> tuple[KeyConfig, ...] | None:
    """All keys; None where none are configured.

    Raises:
        ConfigError: with one sentence naming the key and the fix; never a secret.
    """
    text = environment.get(config.environment, "")
    if config.file is None and not text:
        return None
    keys = keys_from_text(text)
    if config.file is not None:
        try:
            document = read_yaml(config.file, "keys file")
        except FileNotFoundError:
            raise ConfigError(f"keys.file: there is no file {config.file}") from None
        keys += parse_keys(document, str(config.file))
    if len({key.name for key in keys}) != len(keys):
        raise ConfigError(f"keys: a key of {config.file} has the name of one in {config.environment}; rename it")
    return keys


class KeyStore:
    """Keeps `Keys` as the file has them."""

    def __init__(self, config: KeysConfig, parts: int) -> None:
        """`parts`: ingress replicas that share the limits.

        Raises:
            ConfigError: the keys are wrong.
        """
        self._config = config
        self._seen = _version(config.file)
        keys = read_keys(config)
        self.keys = Keys(keys or (), parts)
        self.keys.configure(keys)

    async def keep_current(self) -> None:
        """Read the file again whenever it changes; runs until it is cancelled. What is wrong leaves the keys as are."""
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            version = await asyncio.to_thread(_version, self._config.file)
            if version == self._seen:
                continue
            self._seen = version
            try:
                keys = await asyncio.to_thread(read_keys, self._config)
            except ConfigError as error:
                logger.error("The API keys stay as they were: %s", error)
                continue
            self.keys.configure(keys)
            logger.info("%s API keys are known now.", len(keys or ()))


def _version(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)
