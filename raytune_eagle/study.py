"""Ask, submit, keep, tell: one loop over futures, with no Ray and no clock of its own.

What is kept is the truth: a study that was stopped, however it was stopped, goes on from its records.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from raytune_eagle import gates
from raytune_eagle.confirm import Confirmation
from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.identity import STARTED, check_same, written
from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import Best, Completed, Event, Failed, Job, Kind, TrialRecord
from raytune_eagle.model.workload import Workload
from raytune_eagle.outcomes import Leader, brief, hopeless, in_words, same_text, speedup, violations
from raytune_eagle.ports import Fleet, Node, Pending, Store
from raytune_eagle.reference import Reference
from raytune_eagle.samplers.observed import Launch
from raytune_eagle.search import Proposal, Search
from raytune_eagle.space import Space

_TICK_S = 1.0
_MOST_TRIES = 3
"""A trial is asked again at most twice when machines fail under it."""
_TAKEN_DOWN = 2
"""A configuration under which so many different nodes failed is lost, not asked again."""
_QUARANTINE_S = 10.0
"""For the first failure of a machine in a row; twice as long for each further one."""
_NO_NODE_S = 300.0
_FLUSH_S = 60.0
_RECENT = 50
"""Launches that tell how long the next ones will take."""


@dataclass
class Task:
    """A launch on its way: what is tried and where it was tried already."""

    number: int
    kind: Kind
    config: Config
    proposal: Proposal | None = None
    lost_on: list[str] = field(default_factory=list)
    started_at: float = 0.0


@dataclass
class Bench:
    """What the study knows of one node: plain decoding to compare with, on the prompts of the search and held out."""

    plain: dict[Kind, TrialRecord] = field(default_factory=dict)
    since_baseline: int = 0
    failures: int = 0
    away_until: float = 0.0


class Study:
    """One study over a fleet.

    Args:
        space: the spec and what it spans.
        workload: the prompts to search with.
        held_out: what the end is confirmed with; the same where None.
        store: where records go; it is read once, here.
        listener: called with every event, after it was noted.

    Raises:
        SpecError: records of another spec stand under this name.

    Attributes:
        records: of all launches, growing; brief, see `raytune_eagle.outcomes.brief`.
        trials: those that count against the budget.
    """

    def __init__(
        self,
        space: Space,
        workload: Workload,
        store: Store,
        listener: Callable[[Event], None] = lambda _: None,
        *,
        held_out: Workload | None = None,
    ) -> None:
        self.space, self.spec = space, space.spec
        # keyed anew: the rules may have learnt since that a point goes by another name
        kept = store.read(space.spec.name)
        whole = [record.model_copy(update={"key": space.key(record.config)}) for record in kept]
        self.records = [brief(record) for record in whole]
        self._workload, self._held_out = workload, held_out or workload
        self._store, self._listener = store, listener
        events = list(store.read_events(self.spec.name))
        check_same(self.spec, workload, events)
        self.trials = [record for record in self.records if record.kind == "trial"]
        self._confirmation = Confirmation(self.records, space.baseline(), self.spec.confirm, space.key)
        self._reference = Reference(())
        self._taken, self._lowest = {record.number for record in self.records}, 0
        self._benches: dict[str, Bench] = {}
        for record in whole:
            self._note_plain(record)
        self._leader = Leader(self.spec.objective, self._reference)
        for record in whole:
            self._leader.add(record)
        self._search = Search(space, whole, self._reference)
        self._losses = Counter[str]()
        self._again: deque[Task] = deque()
        self._busy: dict[Pending, tuple[Node, Task]] = {}
        self._lost: dict[int, Task] = {}
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._exhausted = any(event.name == "search_stopped" for event in events)
        self._told = self._exhausted

    # ------------------------------------------------------------------------------------------------- what is known
    def done(self) -> bool:
        """Whether the budget of trials is used up, or every valid point was launched, and the best are confirmed."""
        searched = len(self.trials) >= self.spec.budget.trials or self._exhausted
        return (
            searched or len({r.key for r in self.trials}) >= self._reachable()
        ) and self._confirmation.line() is None

    def learn_from(self, launches: Iterable[Launch]) -> None:
        """Take what earlier studies know of this one's points; before `run`."""
        self._search.learn_from(launches)

    def note(self, event: Event) -> None:
        """Take an event, from any thread."""
        with self._lock:
            self._events.append(event)
        self._listener(event)

    # ------------------------------------------------------------------------------------------------------ the loop
    def run(self, fleet: Fleet) -> None:
        """Go on until the budget is used up. What had come in is kept, whatever ends it.

        Raises:
            SpecError: nothing in this spec can run (plain decoding itself fails, say).
            NodeError: no node has been there for five minutes.
            StoreError: a record could not be kept.
        """
        began = last_node = flushed = fleet.now()
        self._say(fleet, STARTED, written(self.spec, self._workload))
        self._flush()  # before the first launch: what the records were measured with must not be lost with us
        try:
            while True:
                over = self._over(fleet, began)
                self._hand_out(fleet, over=over)
                if not self._busy and self._searched(over=over) and not self._waits_to_confirm(fleet, began):
                    break
                if fleet.nodes():
                    last_node = fleet.now()
                elif fleet.now() - last_node > _NO_NODE_S:
                    raise NodeError(f"no node for {_NO_NODE_S:.0f} s: is a node up that has `eagle_node` and the GPUs?")
                for pending in fleet.wait_any(self._busy, _TICK_S):
                    self._settle(fleet, pending)
                for node, job, outcome in fleet.late():
                    self._settle_late(fleet, node, job, outcome)
                if fleet.now() - flushed > _FLUSH_S:
                    flushed = fleet.now()
                    self._flush()
            self._say(fleet, "study_done", f"{len(self.trials)} trials")
        finally:
            self._flush()

    def _hand_out(self, fleet: Fleet, *, over: bool) -> None:
        occupied = {node.name for node, _ in self._busy.values()}
        nodes = fleet.nodes()
        names = {node.name for node in nodes}
        for node in nodes:
            bench = self._benches.setdefault(node.name, Bench())
            if node.name in occupied or fleet.now() < bench.away_until:
                continue
            task = self._next_confirm(node, bench, names) if self._searched(over=over) else self._next(node, names)
            if task is None:
                self._say_why_stopped(fleet)
                continue
            task.started_at = fleet.now()
            workload = self._held_out if task.kind == "confirm" else self._workload
            job = Job(
                study=self.spec.name,
                number=task.number,
                kind=task.kind,
                config=task.config,
                workload=workload,
                to_beat=self._to_beat(node) if task.kind == "trial" else (),
            )
            self._busy[node.submit(job)] = (node, task)
            self._say(fleet, "trial_started", task.config.command(), node, task.number)

    def _to_beat(self, node: Node) -> tuple[Best, ...]:
        if not self.spec.search.end_hopeless:
            return ()
        return self._leader.to_beat(node.name)

    def _next(self, node: Node, names: set[str]) -> Task | None:
        """A node first measures plain decoding, and again every so often; then what was lost elsewhere; then new."""
        bench = self._benches[node.name]
        if not _same_gpus(bench.plain.get("baseline"), node) or bench.since_baseline >= self.spec.baseline.every:
            return Task(self._number(), "baseline", self.space.baseline())
        again = next((t for t in self._again if node.name not in t.lost_on or names <= set(t.lost_on)), None)
        if again is not None:
            self._again.remove(again)
            return again
        if self._enough():
            return None
        proposal = self._search.ask()
        if proposal is None:
            self._exhausted = True
            return None
        return Task(self._number(), "trial", proposal.config, proposal)

    def _next_confirm(self, node: Node, bench: Bench, names: set[str]) -> Task | None:
        """After the search a node measures plain decoding once more; when all trials are in, the best are confirmed."""
        if bench.since_baseline and not bench.failures:
            return Task(self._number(), "baseline", self.space.baseline())
        busy = [(other, task.kind) for other, task in self._busy.values()]
        if any(kind == "trial" for _, kind in busy):
            return None
        confirming = {other.name for other, kind in busy if kind == "confirm"}
        config = self._confirmation.next_on(node.name, names, confirming)
        return None if config is None else Task(self._number(), "confirm", config)

    def _waits_to_confirm(self, fleet: Fleet, began: float) -> bool:
        """Whether there is something to confirm and, once the hours are over, a node that could: it ends some time."""
        if self._confirmation.line() is None:
            return False
        able = any(fleet.now() >= self._benches[node.name].away_until for node in fleet.nodes())
        return able or fleet.now() - began < self.spec.budget.hours * 3600

    def _enough(self) -> bool:
        under_way = [task for _, task in self._busy.values()] + list(self._again)
        trials = sum(task.kind == "trial" for task in under_way)
        return self._exhausted or len(self.trials) + trials >= self.spec.budget.trials

    def _searched(self, *, over: bool) -> bool:
        """Whether no trial is to be started any more."""
        return over or (self._enough() and not self._again)

    def _over(self, fleet: Fleet, began: float) -> bool:
        """Whether the hours are, but for what confirming takes: half of them at most are kept for it."""
        confirm, hours = self.spec.confirm, self.spec.budget.hours * 3600
        seconds = statistics.median([r.ended_at - r.started_at for r in self.records[-_RECENT:]] or [0.0])
        rounds = confirm.rounds / max(1, min(confirm.rounds, len(fleet.nodes())))
        kept = seconds * rounds * (confirm.top + 2) if confirm.top else 0.0
        return fleet.now() - began >= hours - min(kept, hours / 2)

    def _say_why_stopped(self, fleet: Fleet) -> None:
        """Once, where the search ended by itself though budget is left; a later run does not begin again."""
        if self._exhausted and not self._told and (why := self._search.stopped()):
            self._told = True
            self._say(fleet, "search_stopped", why)

    def _number(self) -> int:
        """The lowest number never used: one whose launch left no record is used again."""
        while self._lowest in self._taken:
            self._lowest += 1
        self._taken.add(self._lowest)
        return self._lowest

    # -------------------------------------------------------------------------------------------- what came of a launch
    def _settle(self, fleet: Fleet, pending: Pending) -> None:
        node, task = self._busy.pop(pending)
        outcome: Completed | Failed | None = None
        trouble: NodeError | None = None
        try:
            outcome = pending.result()
            if task.kind != "baseline" or isinstance(outcome, Completed):
                self._benches[node.name].failures = 0
        except NodeError as exc:
            outcome, trouble = exc.outcome, exc
        if task.lost_on and any(record.number == task.number for record in self.records):
            self._say(fleet, "dropped", "the result of its first try came late and was kept", node, task.number)
        elif outcome is not None:
            self._keep(fleet, node, task, outcome)
        elif trouble is not None:
            self._ask_again(fleet, node, task, trouble)
        if trouble is not None:
            self._put_aside(fleet, node, task, trouble)

    def _settle_late(self, fleet: Fleet, node: Node, job: Job, outcome: Completed | Failed) -> None:
        """A node that was given up is back with a result: kept, unless the trial came to one elsewhere meanwhile."""
        task = self._lost.pop(job.number, None) if job.study == self.spec.name else None
        kept = {record.number for record in self.records}
        if task is None or task.config != job.config or job.number in kept:
            self._say(fleet, "dropped", "late, and no longer asked for", node, job.number)
            return
        if task in self._again:
            self._again.remove(task)
        self._keep(fleet, node, task, outcome)

    def _put_aside(self, fleet: Fleet, node: Node, task: Task, exc: NodeError) -> None:
        bench = self._benches[node.name]
        bench.failures += 1
        pause = _QUARANTINE_S * 2 ** (bench.failures - 1)
        bench.away_until = fleet.now() + pause
        self._say(fleet, "node_quarantined", f"for {pause:.0f} s: {exc}", node, task.number)

    def _ask_again(self, fleet: Fleet, node: Node, task: Task, exc: NodeError) -> None:
        task.lost_on.append(node.name)
        if task.kind == "trial":
            given_up = len(task.lost_on) >= _MOST_TRIES or len(set(task.lost_on)) >= _TAKEN_DOWN
        else:  # the records lack it, so that it is asked for again, as another task; its number is free
            self._losses[task.config.uid] += 1
            given_up = task.kind == "confirm" and self._losses[task.config.uid] >= _MOST_TRIES
        if given_up:
            where = ", ".join(task.lost_on)
            detail = f"lost with every machine that it ran on ({where}): {exc}"
            lost = Failed(status="lost", failure_class="node_lost", failure_phase="unknown", failure_detail=detail)
            self._keep(fleet, node, task, lost)
        elif task.kind == "trial":
            self._lost[task.number] = task
            self._again.append(task)
        else:
            self._taken.discard(task.number)
            self._lowest = min(self._lowest, task.number)

    def _keep(self, fleet: Fleet, node: Node, task: Task, outcome: Completed | Failed) -> None:
        record = self._record(fleet, node, task, outcome)
        self._store.append(record)
        self.records.append(brief(record))
        if record.kind == "trial":
            self.trials.append(self.records[-1])
            self._leader.add(record)
        self._confirmation.add(self.records[-1])
        self._note_plain(record)
        if task.proposal is not None:
            self._search.tell(task.proposal, record)
        self._say(fleet, "trial_done", in_words(record), node, task.number)
        self._flush()
        if why := hopeless(self.spec, self.records):
            raise SpecError(why)
        if record.kind == "baseline" and isinstance(outcome, Failed):  # which works elsewhere, or may the next time
            self._put_aside(fleet, node, task, NodeError(f"plain decoding failed: {outcome.failure_class}"))

    def _record(self, fleet: Fleet, node: Node, task: Task, outcome: Completed | Failed) -> TrialRecord:
        plain = self._benches[node.name].plain.get("confirm" if task.kind == "confirm" else "baseline")
        baseline = plain.outcome if plain and isinstance(plain.outcome, Completed) else None
        if isinstance(outcome, Completed):
            reference = None if task.kind == "baseline" else baseline
            outcome = gates.judged(outcome, reference, self._workload.temperature)
        return TrialRecord(
            study=self.spec.name,
            number=task.number,
            kind=task.kind,
            node=node.name,
            config=task.config,
            key=self.space.key(task.config),
            params=self.space.params(task.config) if task.kind == "trial" else {},
            started_at=task.started_at,
            ended_at=fleet.now(),
            facts=node.facts,
            outcome=outcome,
            speedup=speedup(outcome, baseline) if task.kind != "baseline" else {},
            matches_baseline=same_text(outcome, baseline) if not self._workload.temperature else {},
            violations=violations(self.spec.objective, outcome) if isinstance(outcome, Completed) else (),
        )

    def _note_plain(self, record: TrialRecord) -> None:
        """Take a record for what it says of its node."""
        bench = self._benches.setdefault(record.node, Bench())
        plain = record.key == self.space.key(self.space.baseline())
        if plain and record.kind != "trial" and isinstance(record.outcome, Completed):
            bench.plain[record.kind] = record
            if record.kind == "baseline":
                self._reference.add(record)
        if record.kind != "confirm":
            bench.since_baseline = 0 if record.kind == "baseline" else bench.since_baseline + 1

    # ------------------------------------------------------------------------------------------------------- the rest
    def _reachable(self) -> int:
        """Distinct points that can be launched: the space, and starts outside it."""
        starts = [(s.config, self.space.key(s.config)) for s in self.space.starts]
        outside = {
            key
            for config, key in starts
            if self.space.told(config) is None or self.space.judge(config).canonical is None
        }
        return self.space.size + len(outside)

    def _say(self, fleet: Fleet, name: str, detail: str, node: Node | None = None, number: int | None = None) -> None:
        where = node.name if node else None
        self.note(Event(at=fleet.now(), study=self.spec.name, name=name, node=where, number=number, detail=detail))

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        self._store.append_events(self.spec.name, events)


def _same_gpus(plain: TrialRecord | None, node: Node) -> bool:
    """Whether plain decoding was measured on the GPUs that a node of this name has now; where nobody knows, it was."""
    if plain is None:
        return False
    then, now = plain.facts.gpu_ids, node.facts.gpu_ids
    return then == now or not then or not now
