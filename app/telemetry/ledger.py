"""The last requests of one ingress, for whoever asks about one. Memory is bounded by their number.

Records have no content, and keys see only their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from app.telemetry.record import RequestRecord


class Ledger:
    """Keeps the records of the last requests."""

    def __init__(self, most: int) -> None:
        """`most`: so many."""
        self._most = most
        self._records: OrderedDict[int, RequestRecord] = OrderedDict()
        self._by_id: dict[str, list[int]] = {}
        self._number = 0

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        if not self._most:
            return
        self._number += 1
        self._records[self._number] = record
        self._by_id.setdefault(record.request_id, []).append(self._number)
        while len(self._records) > self._most:
            number, oldest = self._records.popitem(last=False)
            numbers = self._by_id[oldest.request_id]
            numbers.remove(number)
            if not numbers:
                del self._by_id[oldest.request_id]

    def find(self, request_id: str, key: str) -> RequestRecord | None:
        """A caller's request of that id, the last; None where it is not kept."""
        for number in reversed(self._by_id.get(request_id, [])):
            if self._records[number].key == key:
                return self._records[number]
        return None

    def last(self) -> Iterator[RequestRecord]:
        """All that are kept, the last first."""
        return reversed(self._records.values())

    def __len__(self) -> int:
        return len(self._records)
