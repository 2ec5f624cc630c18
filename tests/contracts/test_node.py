"""What every node keeps, over a thread, over a Ray actor on a real local Ray, and in virtual time."""

import time
from contextlib import ExitStack

import pytest
from rigs import Rig, job

from raytune_eagle.model.trial import Completed, Failed


@pytest.fixture(scope="module", params=["local", "simulated", pytest.param("ray", marks=pytest.mark.ray)])
def rig(request, tmp_path_factory):
    with ExitStack() as stack:
        yield Rig(request.param, tmp_path_factory.mktemp("node"), stack)


def test_measured(rig):
    """A good configuration comes back measured."""
    outcome = rig.result(rig.nodes()["local-0"].submit(job(1)))
    assert isinstance(outcome, Completed)
    assert outcome.measurements[0].output_throughput > 0


def test_failure_is_a_value(rig):
    """A configuration that fails is a value with its class, not an exception, and the node takes the next."""
    node = rig.nodes()["local-1"]
    outcome = rig.result(node.submit(job(2, tokens=64)))
    assert isinstance(outcome, Failed)
    assert outcome.failure_class == "tree_too_small"
    assert isinstance(rig.result(node.submit(job(3))), Completed)


def test_two_at_once(rig):
    """Two nodes work side by side; `wait_any` gives whichever is done."""
    pending = {node.submit(job(10 + i)) for i, node in enumerate(rig.nodes().values())}
    for _ in range(300):
        if len([p for p in pending if p.done()]) == 2:
            break
        rig.fleet.wait_any([p for p in pending if not p.done()], 1.0)
    assert all(isinstance(p.result(), Completed) for p in pending)


def test_wait_ends_by_itself(rig):
    """Waiting for nothing, or for what takes longer, ends after the timeout, on the fleet's own clock."""
    before = rig.fleet.now()
    assert rig.fleet.wait_any([], 0.3) == set()
    assert rig.fleet.now() - before >= 0.299


def test_events_carry_node_and_number(rig):
    """The progress of a trial reaches the driver with its node and its number."""
    if rig.kind == "simulated":
        rig = Rig("simulated", None, None)  # virtual nodes have no progress to tell
        assert rig.events == []
        return
    rig.result(rig.nodes()["local-0"].submit(job(20)))
    deadline = time.monotonic() + 20
    while not (mine := [e for e in rig.events if e.number == 20 and e.name == "ready"]):
        assert time.monotonic() < deadline
        rig.fleet.wait_any([], 0.2)
    assert {(e.node, e.study) for e in mine} == {("local-0", "s")}
