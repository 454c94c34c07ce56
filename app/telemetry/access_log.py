"""One line of JSON per request that ended: no content, no keys but their names."""

from __future__ import annotations

import json
import logging

from app.telemetry.explain import describe
from app.telemetry.record import RequestRecord

logger = logging.getLogger("ray.serve.sluice.access")


class AccessLog:
    """Writes the lines to the logger `sluice.access`, at INFO; failures at WARNING."""

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        level = logging.WARNING if record.outcome == "failed" else logging.INFO
        if not logger.isEnabledFor(level):
            return
        line = {name: value for name, value in describe(record).items() if value not in (None, [], "")}
        line["phases"] = {phase["name"]: phase["duration_ms"] for phase in line["phases"]}
        if record.key:
            line["key"] = record.key
        logger.log(level, "%s", json.dumps(line, separators=(",", ":")), extra={"request_id": record.request_id})
