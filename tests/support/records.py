"""Records of requests that ended, for tests of what is told about them."""

from dataclasses import replace

from app.telemetry.record import RequestRecord
from app.types import Timeline

DONE = RequestRecord(
    request_id="r-1",
    route="chat",
    timeline=Timeline(
        received=10.0,
        rendered=10.1,
        dispatched=10.2,
        queued=10.2,
        scheduled=12.0,
        first_token=12.4,
        first_sent=12.5,
        last_token=14.4,
        finished=14.5,
        prompt_tokens=900,
        cached_tokens=100,
        output_tokens=41,
    ),
    end=14.5,
    received_at=1_700_000_000.0,
    outcome="finished",
    service_class="interactive",
    home_pool="interactive",
    pool="batch",
    status=200,
    ttft_target_s=3.0,
    tpot_target_s=0.06,
    predicted_ttft_s=0.4,
    predicted_wait_s=0.2,
)
# It went away, was refused, failed before it had a first token.
NOTHING = replace(DONE, timeline=Timeline(received=10.0, rendered=10.1), end=10.2, pool="interactive")
