"""What a gate may look at, and how it says what it found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raytune_eagle.checkpoints.weights import Checkpoint, UnreadableError
from raytune_eagle.model.config import Config, FlagValue
from raytune_eagle.model.measurement import Gate, Measurement, Request, Sample
from raytune_eagle.model.trial import ServerFacts
from raytune_eagle.model.workload import Workload

LEAST_ACCEPT_LEN = 1.05
"""Tokens per verify round. A random draft gives 1.00; an EAGLE-3 draft under EAGLE 1.0 to 1.2, by chance."""
LOW_SHARE = 0.25
"""Of a token per draft step, up to three: less is low for a draft that fits. The bundled pair accepts 2.5 tokens in 3
steps, and 1.4 to 1.8 when other layers are captured than it was trained on; published drafts accept 2.4 and more."""


@dataclass(frozen=True)
class Seen:
    """A running server as far as it can be looked at.

    Attributes:
        log: its text so far, secrets out.
        measurements, requests, samples: of its bench; empty before it.
    """

    config: Config
    workload: Workload
    facts: ServerFacts
    log: str = ""
    measurements: Sequence[Measurement] = ()
    requests: Sequence[Request] = ()
    samples: Sequence[Sample] = ()

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """Its resolved arguments; empty when it could not be asked."""
        found = json.loads(self.facts.resolved_args)
        return found if isinstance(found, dict) else {}

    @property
    def streams(self) -> int:
        """Highest concurrency measured."""
        return max(self.workload.concurrency)

    def number(self, *names: str) -> int | None:
        """First of these that is a whole number, in its internal state or else its arguments."""
        states = self.info.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        found = (source.get(name) for name in names for source in (state, self.info))
        return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)

    @property
    def flags(self) -> dict[str, FlagValue]:
        """Every flag of the launch; of one given twice the last, as argparse has it."""
        words = self.config.speculative.argv() if self.config.speculative else []
        speculative = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
        return {**self.config.args, **speculative, **self.config.tuned_args}


def looked(seen: Seen, *looks: Callable[[Seen], Iterable[Gate]]) -> tuple[Gate, ...]:
    """All that these say; what a server tells in an unknown shape takes neither the others nor the figures along."""
    found: list[Gate] = []
    for look in looks:
        try:
            found += look(seen)
        except (TypeError, ValueError, LookupError, AttributeError) as exc:
            found.append(unknown(look.__name__.strip("_"), f"the server tells it in a shape not known here: {exc!r}"))
    return tuple(found)


def passed(name: str) -> Gate:
    """Nothing to say."""
    return Gate(name=name, verdict="passed")


def warned(name: str, detail: str) -> Gate:
    """The figures stand, with this."""
    return Gate(name=name, verdict="warning", detail=detail)


def failed(name: str, detail: str) -> Gate:
    """The figures are not what they would be believed for."""
    return Gate(name=name, verdict="failed", detail=detail)


def unknown(name: str, detail: str) -> Gate:
    """Nothing told it."""
    return Gate(name=name, verdict="unknown", detail=detail)


def draft_folder(seen: Seen) -> Checkpoint | None:
    """The draft as the running server names it; None where it cannot be read here."""
    folder = str(seen.info.get("speculative_draft_model_path") or "")
    if folder and Path(folder).is_dir():
        with suppress(UnreadableError):
            return Checkpoint(folder)
    return None
