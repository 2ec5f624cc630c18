"""What is launched again at the end, and where: told from the records alone, so a stopped study knows where it was.

The best of many launches is partly the luckiest. So the best few, plain decoding as configured, and plain decoding
under the best one's NCCL and server settings are launched again, on prompts that the search never saw. A round is one
launch of each on one node, one after the other; the next round goes through them backwards. What a node or an hour
does to a round it does to all of it, and a steady drift cancels between two rounds. Where a study goes on after that,
its end is confirmed anew.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.ranking import Row, confirmed, searched
from raytune_eagle.spec import Confirm

KeyOf = Callable[[Config], str]

_RECENT = 50
"""Launches that tell how long the next ones will take."""


class Again(NamedTuple):
    """A configuration to launch again, and the key of the point that it is."""

    key: str
    config: Config


@dataclass(frozen=True)
class Lineup:
    """What one round launches, in order, each point once.

    Attributes:
        before: the line-up whose rounds came before: its launches are none of these rounds.
    """

    line: tuple[Again, ...]
    before: Lineup | None = None

    def next_on(self, node: str, records: Sequence[TrialRecord], begun: int) -> Again:
        """What a node launches next: the rest of the round that it is in the middle of, or the start of another.

        `begun` is how many rounds are through or under way on other nodes: every other round runs backwards.
        """
        counts = self._counts(records, node)
        missing = [again for again in self.line if counts[again.key] == min(counts.values())]
        launched = [again for again in self.line if again not in missing]
        backwards = self.line[-1] in launched if launched else begun % 2 == 1
        return missing[-1 if backwards else 0]

    def in_the_middle(self, node: str, records: Sequence[TrialRecord]) -> bool:
        """Whether a node has launched a part of a round."""
        counts = self._counts(records, node).values()
        return max(counts) > min(counts)

    def full_rounds(self, records: Sequence[TrialRecord]) -> int:
        """Rounds that are through, on whatever node. One that was broken off with its node is none.

        Its launches have nothing to be compared with on another node.
        """
        return sum(self.full_on(node, records) for node in {record.node for record in records})

    def full_on(self, node: str, records: Sequence[TrialRecord]) -> int:
        """Those on one node."""
        return min(self._counts(records, node).values())

    def _counts(self, records: Sequence[TrialRecord], node: str) -> dict[str, int]:
        launched = Counter(record.key for record in records if record.kind == "confirm" and record.node == node)
        earlier = self.before.keys() if self.before else set[str]()
        offset = self.before.full_on(node, records) if self.before else 0
        return {again.key: launched[again.key] - offset * (again.key in earlier) for again in self.line}

    def keys(self) -> set[str]:
        """Of its points."""
        return {again.key for again in self.line}

    def of_rounds(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """The records of the rounds that are through."""
        room = Counter({node: self.full_on(node, records) for node in {record.node for record in records}})
        taken, found = Counter[tuple[str, str]](), []
        for record in records:
            place = (record.node, record.key)
            if record.kind == "confirm" and record.key in self.keys() and taken[place] < room[record.node]:
                taken[place] += 1
                found.append(record)
        return found


class Confirmation:
    """What is still to be confirmed of one study; what it knows of is added launch by launch.

    Args:
        records: of the study so far.
        baseline: plain decoding as configured.
        confirm: how much is confirmed.
        key_of: names the point that a configuration is.
    """

    def __init__(self, records: Sequence[TrialRecord], baseline: Config, confirm: Confirm, key_of: KeyOf) -> None:
        self._baseline, self._confirm, self._key_of = baseline, confirm, key_of
        self._searched: list[TrialRecord] = []
        self._launched: list[TrialRecord] = []
        self._last = -1
        for record in records:
            self.add(record)

    def add(self, record: TrialRecord) -> None:
        """Take one more launch, of whatever kind."""
        if record.kind != "confirm":
            self._searched.append(record)
            self.__dict__.pop("_first", None)
        if record.kind == "trial":  # see `raytune_eagle.ranking.confirming`
            self._last = max(self._last, record.number)
            self._launched = [each for each in self._launched if each.number > self._last]
        elif record.kind == "confirm" and record.number > self._last:
            self._launched.append(record)

    @cached_property
    def _first(self) -> Lineup | None:
        """Thousands of trials are not ranked anew for each node that is free."""
        return lineup(self._searched, self._baseline, self._confirm, self._key_of)

    def line(self) -> Lineup | None:
        """What the rounds that are not through launch; None when nothing is left to confirm."""
        first, launched, rounds = self._first, self._launched, self._confirm.rounds
        if first is None or first.full_rounds(launched) < rounds:
            return first
        late = late_lineup(launched, first, self._key_of)
        return late if late is not None and late.full_rounds(launched) < rounds else None

    def next_on(self, node: str, names: set[str], confirming: set[str]) -> Config | None:
        """What `node`, one of `names`, launches next while others are `confirming`; None when enough is begun."""
        line, launched = self.line(), self._launched
        if line is None:
            return None
        others = {record.node for record in launched} & names - {node}
        midway = {name for name in others if line.in_the_middle(name, launched)}
        begun = line.full_rounds(launched) + len(confirming | midway)
        return line.next_on(node, launched, begun).config if begun < self._confirm.rounds else None


def lineup(records: Sequence[TrialRecord], baseline: Config, confirm: Confirm, key_of: KeyOf) -> Lineup | None:
    """What is confirmed of these trials; None when there is nothing to confirm.

    The best of each concurrency in turn until ``confirm.top`` are chosen, and at least one for each concurrency.
    """
    levels = _levels(records)
    best = [searched(records, level) for level in levels]
    chosen = _in_turn(best, max(confirm.top, len(levels))) if confirm.top else []
    if not chosen:
        return None
    plain = [baseline, *(plain_under(rows[0].config) for rows in best if rows)]
    return Lineup(_distinct([*plain, *(row.config for row in chosen)], key_of))


def late_lineup(records: Sequence[TrialRecord], first: Lineup, key_of: KeyOf) -> Lineup | None:
    """What is launched once the rounds of `first` are through; None for nothing, as it mostly is.

    When another than the best of the search came out ahead, under other NCCL or server settings, plain decoding under
    those is still to be measured, beside it.
    """
    known, rounds = {again.key for again in first.line}, first.of_rounds(records)
    ahead = [row.config for level in _levels(rounds) for row in confirmed(rounds, level)[:1] if row.config.speculative]
    pairs = [(plain_under(config), config) for config in ahead if key_of(plain_under(config)) not in known]
    return Lineup(_distinct([config for pair in pairs for config in pair], key_of), first) if pairs else None


def seconds_of(confirm: Confirm, records: Sequence[TrialRecord], nodes: int) -> float:
    """How long confirming takes on so many nodes, were its launches as long as the latest of `records`."""
    if not confirm.top:
        return 0.0
    seconds = statistics.median([r.ended_at - r.started_at for r in records[-_RECENT:]] or [0.0])
    rounds = confirm.rounds / max(1, min(confirm.rounds, nodes))
    return seconds * rounds * (confirm.top + 2)


def plain_under(config: Config) -> Config:
    """Plain decoding under the environment and server flags of `config`."""
    return config.model_copy(update={"speculative": None})


def _levels(records: Iterable[TrialRecord]) -> list[int]:
    measured = (record.outcome.measurements for record in records if isinstance(record.outcome, Completed))
    return sorted({figures.concurrency for found in measured for figures in found})


def _in_turn(best: Sequence[Sequence[Row]], count: int) -> list[Row]:
    places = max((len(rows) for rows in best), default=0)
    order = [rows[place] for place in range(places) for rows in best if place < len(rows)]
    return list({row.key: row for row in order}.values())[:count]


def _distinct(configs: Sequence[Config], key_of: KeyOf) -> tuple[Again, ...]:
    found: dict[str, Config] = {}
    for config in configs:
        found.setdefault(key_of(config), config)
    return tuple(Again(*each) for each in found.items())
