"""Ask, submit, keep, tell: one loop over futures, with no Ray and no clock of its own.

What is kept is the truth: a study that was stopped, however it was stopped, goes on from its records.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.model import Completed, Config, Event, Failed, Job, Kind, TrialRecord, Workload
from raytune_eagle.outcomes import in_words, same_text, speedup, violations
from raytune_eagle.ports import Fleet, Node, Pending, Store
from raytune_eagle.search import Proposal, Search
from raytune_eagle.space import Params, Space
from raytune_eagle.spec import differences

_TICK_S = 1.0
_MOST_TRIES = 3
"""A trial is asked again at most twice when machines fail under it."""
_TAKEN_DOWN = 2
"""A configuration under which so many different nodes failed is lost, not asked again."""
_QUARANTINE_S = 60.0
_NO_NODE_S = 300.0
_FLUSH_S = 60.0
_PROMPTS = "workload.prompts (contents)"


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
    """What the study knows of one node."""

    baseline: TrialRecord | None = None
    since_baseline: int = 0
    failures: int = 0
    away_until: float = 0.0


class Study:
    """One study over a fleet.

    Args:
        space: the spec and what it spans.
        workload: the prompts to send.
        store: where records go; it is read once, here.
        listener: called with every event, after it was noted.

    Raises:
        SpecError: records of another spec stand under this name.
    """

    def __init__(
        self, space: Space, workload: Workload, store: Store, listener: Callable[[Event], None] = lambda _: None
    ) -> None:
        self.space, self.spec, self.records = space, space.spec, list(store.read(space.spec.name))
        self._workload, self._store, self._listener = workload, store, listener
        self._check_same_spec(store.read_events(self.spec.name))
        self._search = Search(space, self.records)
        self._taken = {record.number for record in self.records}
        self._benches: dict[str, Bench] = {}
        for record in self.records:
            self._note_baseline(record)
        self._again: deque[Task] = deque()
        self._busy: dict[Pending, tuple[Node, Task]] = {}
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._exhausted = False

    # ------------------------------------------------------------------------------------------------- what is known
    @property
    def trials(self) -> list[TrialRecord]:
        """Launches that count against the budget."""
        return [record for record in self.records if record.kind == "trial"]

    def done(self) -> bool:
        """Whether the budget of trials is used up or every valid point was launched."""
        return len(self.trials) >= self.spec.budget.trials or len({r.key for r in self.trials}) >= self._reachable()

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
        written = self.spec.model_dump(mode="json", by_alias=True) | {_PROMPTS: self._prompts_digest()}
        self._say(fleet, "study_started", json.dumps(written))
        self._flush()  # before the first launch: what the records were measured with must not be lost with us
        try:
            while True:
                self._hand_out(fleet, began)
                if not self._busy and self._nothing_left(fleet, began):
                    break
                if fleet.nodes():
                    last_node = fleet.now()
                elif fleet.now() - last_node > _NO_NODE_S:
                    raise NodeError(f"no node for {_NO_NODE_S:.0f} s: is a node up that has `eagle_node` and the GPUs?")
                for pending in fleet.wait_any(self._busy, _TICK_S):
                    self._settle(fleet, pending)
                if fleet.now() - flushed > _FLUSH_S:
                    flushed = fleet.now()
                    self._flush()
            self._say(fleet, "study_done", f"{len(self.trials)} trials")
        finally:
            self._flush()

    def _hand_out(self, fleet: Fleet, began: float) -> None:
        occupied = {node.name for node, _ in self._busy.values()}
        nodes = fleet.nodes()
        names = {node.name for node in nodes}
        over = fleet.now() - began >= self.spec.budget.hours * 3600
        for node in nodes:
            bench = self._benches.setdefault(node.name, Bench())
            if node.name in occupied or fleet.now() < bench.away_until:
                continue
            task = None if over else self._next(node, bench, names)
            if task is None:
                continue
            task.started_at = fleet.now()
            job = Job(
                study=self.spec.name, number=task.number, kind=task.kind, config=task.config, workload=self._workload
            )
            self._busy[node.submit(job)] = (node, task)
            self._say(fleet, "trial_started", task.config.command(), node, task.number)

    def _next(self, node: Node, bench: Bench, names: set[str]) -> Task | None:
        """A node first measures plain decoding, and again every so often; then what was lost elsewhere; then new."""
        if self._enough() and not self._again:
            return None
        if bench.baseline is None or bench.since_baseline >= self.spec.baseline.every:
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

    def _enough(self) -> bool:
        under_way = [task for _, task in self._busy.values()] + list(self._again)
        trials = sum(task.kind == "trial" for task in under_way)
        return self._exhausted or len(self.trials) + trials >= self.spec.budget.trials

    def _nothing_left(self, fleet: Fleet, began: float) -> bool:
        over = fleet.now() - began >= self.spec.budget.hours * 3600
        return over or (self._enough() and not self._again)

    def _number(self) -> int:
        """The lowest number never used: one whose launch left no record is used again."""
        number = next(n for n in range(len(self._taken) + 1) if n not in self._taken)
        self._taken.add(number)
        return number

    # -------------------------------------------------------------------------------------------- what came of a launch
    def _settle(self, fleet: Fleet, pending: Pending) -> None:
        node, task = self._busy.pop(pending)
        try:
            outcome = pending.result()
        except NodeError as exc:
            self._put_aside(fleet, node, task, exc)
            if exc.outcome is None:
                self._ask_again(fleet, node, task, exc)
                return
            outcome = exc.outcome
        else:
            self._benches[node.name].failures = 0
        self._keep(fleet, node, task, outcome)

    def _put_aside(self, fleet: Fleet, node: Node, task: Task, exc: NodeError) -> None:
        bench = self._benches[node.name]
        bench.failures += 1
        pause = _QUARANTINE_S * 2 ** (bench.failures - 1)
        bench.away_until = fleet.now() + pause
        self._say(fleet, "node_quarantined", f"for {pause:.0f} s: {exc}", node, task.number)

    def _ask_again(self, fleet: Fleet, node: Node, task: Task, exc: NodeError) -> None:
        if task.kind == "baseline":  # its node will be asked for one again
            self._taken.discard(task.number)
            return
        task.lost_on.append(node.name)
        if len(task.lost_on) < _MOST_TRIES and len(set(task.lost_on)) < _TAKEN_DOWN:
            self._again.append(task)
            return
        where = ", ".join(task.lost_on)
        detail = f"lost with every machine that it ran on ({where}): {exc}"
        lost = Failed(status="lost", failure_class="node_lost", failure_phase="unknown", failure_detail=detail)
        self._keep(fleet, node, task, lost)

    def _keep(self, fleet: Fleet, node: Node, task: Task, outcome: Completed | Failed) -> None:
        record = self._record(fleet, node, task, outcome)
        self._store.append(record)
        self.records.append(record)
        self._note_baseline(record)
        if task.proposal is not None:
            self._search.tell(task.proposal, record)
        self._say(fleet, "trial_done", in_words(record), node, task.number)
        self._flush()
        if task.kind == "baseline" and isinstance(outcome, Failed):
            raise SpecError(
                f"plain decoding itself fails with these engine settings: {outcome.failure_class}: "
                f"{outcome.failure_detail}"
            )

    def _record(self, fleet: Fleet, node: Node, task: Task, outcome: Completed | Failed) -> TrialRecord:
        bench = self._benches[node.name]
        reference = bench.baseline.outcome if bench.baseline else None
        baseline = reference if isinstance(reference, Completed) else None
        return TrialRecord(
            study=self.spec.name,
            number=task.number,
            kind=task.kind,
            node=node.name,
            config=task.config,
            key=self.space.key(task.config),
            params=self._params(task),
            started_at=task.started_at,
            ended_at=fleet.now(),
            facts=node.facts,
            outcome=outcome,
            speedup=speedup(outcome, baseline) if task.kind != "baseline" else {},
            matches_baseline=same_text(outcome, baseline) if not self._workload.temperature else {},
            violations=violations(self.spec.objective, outcome) if isinstance(outcome, Completed) else (),
        )

    def _params(self, task: Task) -> Params:
        return self.space.params(task.config) if task.kind == "trial" else {}

    def _note_baseline(self, record: TrialRecord) -> None:
        bench = self._benches.setdefault(record.node, Bench())
        if record.kind == "baseline" and isinstance(record.outcome, Completed):
            bench.baseline, bench.since_baseline = record, 0
        elif record.kind == "trial":
            bench.since_baseline += 1

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

    def _check_same_spec(self, events: Iterable[Event]) -> None:
        started = next((event for event in events if event.name == "study_started"), None)
        if started is None:
            return
        written = json.loads(started.detail)
        prompts = written.pop(_PROMPTS, self._prompts_digest())
        old = type(self.spec).model_validate(written).identity() | {_PROMPTS: prompts}
        changed = differences(old, self.spec.identity() | {_PROMPTS: self._prompts_digest()})
        if changed:
            head = f"name: study {self.spec.name!r} exists with another spec: use another name (--study). What changed:"
            raise SpecError([head, *(f"  {line}" for line in changed)])

    def _prompts_digest(self) -> str:
        """What the prompts say, not where they lie: a changed file makes other figures."""
        text = json.dumps([prompt.model_dump() for prompt in self._workload.prompts], sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()

    def _say(self, fleet: Fleet, name: str, detail: str, node: Node | None = None, number: int | None = None) -> None:
        where = node.name if node else None
        self.note(Event(at=fleet.now(), study=self.spec.name, name=name, node=where, number=number, detail=detail))

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        self._store.append_events(self.spec.name, events)
