"""Ask, submit, keep, tell: one loop over futures, with no Ray and no clock of its own.

What is kept is the truth: a study that was stopped, however it was stopped, goes on from its records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from raytune_eagle import gates
from raytune_eagle.confirm import Confirmation, seconds_of
from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.identity import STARTED, check_same, written
from raytune_eagle.model.trial import Completed, Event, Failed, Job, TrialRecord
from raytune_eagle.model.workload import Workload
from raytune_eagle.outcomes import Leader, brief, hopeless, in_words, same_text, speedup, violations
from raytune_eagle.ports import Fleet, Node, Pending, Store
from raytune_eagle.reference import Reference
from raytune_eagle.search import Search
from raytune_eagle.space import Space
from raytune_eagle.study.benches import Bench
from raytune_eagle.study.journal import Journal
from raytune_eagle.study.tasks import Task, Tasks

_TICK_S = 1.0
_NO_NODE_S = 300.0
_FLUSH_S = 60.0


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
        search: takes what earlier studies and the study's probe know, before `run`.
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
        self._store, self._journal = store, Journal(store, space.spec.name, listener)
        events = list(store.read_events(self.spec.name))
        check_same(self.spec, workload, events)
        self.trials = [record for record in self.records if record.kind == "trial"]
        self._confirmation = Confirmation(self.records, space.baseline(), self.spec.confirm, space.key)
        self._reference = Reference(())
        self._tasks = Tasks(record.number for record in self.records)
        self._benches = defaultdict[str, Bench](Bench)
        for record in whole:
            self._note_plain(record)
        self._leader = Leader(self.spec.objective, self._reference)
        for record in whole:
            self._leader.add(record)
        self.search = Search(space, whole, self._reference)
        self._exhausted = any(event.name == "search_stopped" for event in events)
        self._told = self._exhausted

    # ------------------------------------------------------------------------------------------------- what is known
    def done(self) -> bool:
        """Whether the budget of trials is used up, or every valid point was launched, and the best are confirmed."""
        searched = len(self.trials) >= self.spec.budget.trials or self._exhausted
        searched = searched or len({r.key for r in self.trials}) >= self.search.reachable()
        return searched and self._confirmation.line() is None

    def note(self, event: Event) -> None:
        """Take an event, from any thread."""
        self._journal.note(event)

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
        self._journal.flush()  # before the first launch: what the records were measured with must not be lost with us
        try:
            while True:
                over = self._over(fleet, began)
                self._hand_out(fleet, over=over)
                if not self._tasks.busy and self._searched(over=over) and not self._waits_to_confirm(fleet, began):
                    break
                if fleet.nodes():
                    last_node = fleet.now()
                elif fleet.now() - last_node > _NO_NODE_S:
                    raise NodeError(f"no node for {_NO_NODE_S:.0f} s: is a node up that has `eagle_node` and the GPUs?")
                for pending in fleet.wait_any(self._tasks.busy, _TICK_S):
                    self._settle(fleet, pending)
                for node, job, outcome in fleet.late():
                    self._settle_late(fleet, node, job, outcome)
                if fleet.now() - flushed > _FLUSH_S:
                    flushed = fleet.now()
                    self._journal.flush()
            self._say(fleet, "study_done", f"{len(self.trials)} trials")
        finally:
            self._journal.flush()

    def _hand_out(self, fleet: Fleet, *, over: bool) -> None:
        occupied = {node.name for node, _ in self._tasks.busy.values()}
        nodes = fleet.nodes()
        names = {node.name for node in nodes}
        for node in nodes:
            bench = self._benches[node.name]
            if node.name in occupied or fleet.now() < bench.away_until:
                continue
            task = self._next_confirm(node, bench, names) if self._searched(over=over) else self._next(node, names)
            if task is None:
                self._say_why_stopped(fleet)
                continue
            task.started_at = fleet.now()
            self._tasks.busy[node.submit(self._job(task, node))] = (node, task)
            self._say(fleet, "trial_started", task.config.command(), node, task.number)

    def _job(self, task: Task, node: Node) -> Job:
        return Job(
            study=self.spec.name,
            number=task.number,
            kind=task.kind,
            config=task.config,
            workload=self._held_out if task.kind == "confirm" else self._workload,
            to_beat=self._leader.to_beat(node.name) if task.kind == "trial" and self.spec.search.end_hopeless else (),
        )

    def _next(self, node: Node, names: set[str]) -> Task | None:
        """A node first measures plain decoding, and again every so often; then what was lost elsewhere; then new."""
        if self._benches[node.name].owes_plain(node, self.spec.baseline.every):
            return self._tasks.new("baseline", self.space.baseline())
        if again := self._tasks.again_on(node.name, names):
            return again
        if self._enough():
            return None
        proposal = self.search.ask()
        if proposal is None:
            self._exhausted = True
            return None
        return self._tasks.new("trial", proposal.config, proposal)

    def _next_confirm(self, node: Node, bench: Bench, names: set[str]) -> Task | None:
        """After the search a node measures plain decoding once more; when all trials are in, the best are confirmed."""
        if bench.since_baseline and not bench.failures:
            return self._tasks.new("baseline", self.space.baseline())
        busy = [(other, task.kind) for other, task in self._tasks.busy.values()]
        if any(kind == "trial" for _, kind in busy):
            return None
        confirming = {other.name for other, kind in busy if kind == "confirm"}
        config = self._confirmation.next_on(node.name, names, confirming)
        return None if config is None else self._tasks.new("confirm", config)

    def _waits_to_confirm(self, fleet: Fleet, began: float) -> bool:
        """Whether there is something to confirm and, once the hours are over, a node that could: it ends some time."""
        if self._confirmation.line() is None:
            return False
        able = any(fleet.now() >= self._benches[node.name].away_until for node in fleet.nodes())
        return able or fleet.now() - began < self.spec.budget.hours * 3600

    def _enough(self) -> bool:
        return self._exhausted or len(self.trials) + self._tasks.trials() >= self.spec.budget.trials

    def _searched(self, *, over: bool) -> bool:
        """Whether no trial is to be started any more."""
        return over or (self._enough() and not self._tasks.waiting)

    def _over(self, fleet: Fleet, began: float) -> bool:
        """Whether the hours are, but for what confirming takes: half of them at most are kept for it."""
        hours = self.spec.budget.hours * 3600
        kept = seconds_of(self.spec.confirm, self.records, len(fleet.nodes()))
        return fleet.now() - began >= hours - min(kept, hours / 2)

    def _say_why_stopped(self, fleet: Fleet) -> None:
        """Once, where the search ended by itself though budget is left; a later run does not begin again."""
        if self._exhausted and not self._told and (why := self.search.stopped()):
            self._told = True
            self._say(fleet, "search_stopped", why)

    # -------------------------------------------------------------------------------------------- what came of a launch
    def _settle(self, fleet: Fleet, pending: Pending) -> None:
        node, task = self._tasks.busy.pop(pending)
        outcome: Completed | Failed | None = None
        trouble: NodeError | None = None
        try:
            outcome = pending.result()
            if task.kind != "baseline" or isinstance(outcome, Completed):
                self._benches[node.name].failures = 0
        except NodeError as exc:
            outcome, trouble = exc.outcome, exc
        if task.lost_on and self._is_kept(task):
            self._say(fleet, "dropped", "the result of its first try came late and was kept", node, task.number)
        elif outcome is not None:
            self._keep(fleet, node, task, outcome)
        elif trouble is not None:
            self._ask_again(fleet, node, task, trouble)
        if trouble is not None:
            self._put_aside(fleet, node, task, trouble)

    def _settle_late(self, fleet: Fleet, node: Node, job: Job, outcome: Completed | Failed) -> None:
        """A node that was given up is back with a result: kept, unless the trial came to one elsewhere meanwhile."""
        task = self._tasks.found(job) if job.study == self.spec.name else None
        if task is None or self._is_kept(task):
            self._say(fleet, "dropped", "late, and no longer asked for", node, job.number)
            return
        self._keep(fleet, node, task, outcome)

    def _put_aside(self, fleet: Fleet, node: Node, task: Task, exc: NodeError) -> None:
        pause = self._benches[node.name].put_aside(fleet.now())
        self._say(fleet, "node_quarantined", f"for {pause:.0f} s: {exc}", node, task.number)
        self._journal.flush()  # for whoever asks `nodes`

    def _ask_again(self, fleet: Fleet, node: Node, task: Task, exc: NodeError) -> None:
        if self._tasks.lost(task, node.name):
            where = ", ".join(task.lost_on)
            detail = f"lost with every machine that it ran on ({where}): {exc}"
            lost = Failed(status="lost", failure_class="node_lost", failure_phase="unknown", failure_detail=detail)
            self._keep(fleet, node, task, lost)

    def _is_kept(self, task: Task) -> bool:
        return any(record.number == task.number for record in self.records)

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
            self.search.tell(task.proposal, record)
        self._say(fleet, "trial_done", in_words(record), node, task.number)
        self._journal.flush()
        if why := hopeless(self.spec, self.records):
            raise SpecError(why)
        if record.kind == "baseline" and isinstance(outcome, Failed):  # which works elsewhere, or may the next time
            self._put_aside(fleet, node, task, NodeError(f"plain decoding failed: {outcome.failure_class}"))

    def _record(self, fleet: Fleet, node: Node, task: Task, outcome: Completed | Failed) -> TrialRecord:
        baseline = self._benches[node.name].to_compare(task.kind)
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
        plain = record.key == self.space.key(self.space.baseline())
        plain = plain and record.kind != "trial" and isinstance(record.outcome, Completed)
        self._benches[record.node].note(record, plain=plain)
        if plain and record.kind == "baseline":
            self._reference.add(record)

    def _say(self, fleet: Fleet, name: str, detail: str, node: Node | None = None, number: int | None = None) -> None:
        where = node.name if node else None
        self.note(Event(at=fleet.now(), study=self.spec.name, name=name, node=where, number=number, detail=detail))
