"""A fleet of two nodes of each kind, with the fake server behind it."""

import json
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import yaml
from made import completed, failed

from raytune_eagle import cluster, specfile
from raytune_eagle.engines.launch import Settings
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import Job
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.nodes.local import LocalFleet, LocalNode
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet

FAKE = Path(__file__).parent / "fakes" / "launch_server.py"
WORKLOAD = Workload(
    prompts=tuple(Prompt(id=str(i), category="code", text=f"def f{i}(x):") for i in range(4)),
    max_new_tokens=16,
    max_passes=2,
)
SPEC = """
name: s
engine: {model: builtin:tiny, draft: builtin:tiny}
node: {gpus: 0}
space: {speculative: {num_steps: [1, 2], eagle_topk: [1], num_draft_tokens: [2]}}
"""


def job(number, tokens=12, env=None):
    spec = Speculative(draft="builtin:tiny", num_steps=3, eagle_topk=4, num_draft_tokens=tokens)
    config = Config(model="builtin:tiny", speculative=spec, launcher=("python3", str(FAKE)), env=env or {})
    return Job(study="s", number=number, kind="trial", config=config, workload=WORKLOAD)


def simulated(node, work):
    if "never_ready" in work.config.env.get("RAYTUNE_FAKE", ""):
        return Answer(completed(100), 1e6)
    too_small = work.config.speculative.num_draft_tokens > 37
    return Answer(failed("tree_too_small") if too_small else completed(100), 30.0)


def fake_servers(owner=None):
    """The fake servers that run in our own pid namespace (not those of a lab's hosts), each with the pid of its owner.

    Another test may run some beside: with `owner`, only what guards of this process guard.
    """
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(FAKE) not in words or not _is_guard(words) or not _is_ours(process.pid):
            continue
        owned_by = json.loads(next(word for word in words if word.startswith("{")))["owner"]
        if owner in (None, owned_by):
            with suppress(psutil.NoSuchProcess):
                found += [(server, owned_by) for server in process.children() if not _is_guard(server.cmdline())]
    return found


def _is_guard(words):
    """It forks twice, and its command has its command line until it is executed."""
    return any(word.endswith("guard.py") for word in words)


def _is_ours(pid):
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino == Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return False


class Rig:
    """A fleet of two nodes, and what it told."""

    def __init__(self, kind, folder, stack):
        self.kind, self.events = kind, []
        if kind == "simulated":
            self.fleet = SimulatedFleet(["local-0", "local-1"], simulated)
        elif kind == "local":
            make = partial(cluster.make_engine, {}, Settings(work_dir=folder))
            self.fleet = LocalFleet([LocalNode(f"local-{i}", make("x"), self.events.append) for i in range(2)])
            stack.callback(self.fleet.close)
        else:
            spec = specfile.parse(yaml.safe_load(SPEC))
            self.fleet = stack.enter_context(cluster.open_fleet(spec, "local", 2, self.events.append))
        self.nodes()

    def nodes(self, count=2):
        deadline = time.monotonic() + 60
        while len(found := self.fleet.nodes()) < count:
            assert time.monotonic() < deadline, f"{len(found)} nodes after 60 s"
            self.fleet.wait_any([], 0.2)
        return {node.name: node for node in found}

    def result(self, pending):
        for _ in range(300):
            if pending in self.fleet.wait_any([pending], 1.0):
                return pending.result()
        raise AssertionError("not done in 300 s")
