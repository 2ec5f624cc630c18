"""What is tuned, measured and kept: frozen values that know how to spell themselves, and nothing else.

Times are seconds since the epoch where the name ends in ``_at``, durations in the unit that the name ends in
(``_s``, ``_ms``); throughput is output tokens per second over all streams together.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """Base of all values here: frozen, and unknown fields are mistakes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
