"""A running Ray cluster: is it there, which nodes does it have, and what do they answer to a question?"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private import services, worker
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.model.trial import Job
from raytune_eagle.nodes.address import host_and_port

_log = logging.getLogger(__name__)

RESOURCE = "eagle_node"
NAMESPACE = "raytune-eagle"
"""Ray namespace in which the owners of nodes are found, under their node's name and a number."""
NAME_LABEL = "eagle-node"
"""Ray label that names a node; without it a node goes by its host's name."""

_REACH_S = 5.0
_TELL_S = 20.0
"""A question takes seconds; after so long, and now and then afterwards, it is told who is waited for."""
_SETTINGS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""What opens a connection of HTTP/2 (RFC 9113, 3.4), with an empty frame of settings."""


def join(address: str, namespace: str | None = None) -> None:
    """Become a driver of the cluster at `address`: ``HOST:PORT``, or ``auto``.

    Raises:
        SpecError: `address` cannot be one.
        NodeError: there is none, or it refuses us; told within seconds, which Ray itself would not do.
    """
    reach(address)
    worker.print_to_stdstream = _unheard  # else the last words of a raylet, pages of them, come on stdout (2.60)
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except Exception as exc:
        raise _why(address, exc) from exc


def _unheard(*_: Any, **__: Any) -> None:
    """What a raylet says is in its log."""


def reach(address: str) -> None:
    """Raise `NodeError` unless the head of a cluster answers there: `ray.init` would try for minutes.

    `SpecError` for what cannot be an address.
    """
    if address != "auto":
        host_and_port(address)
    try:
        found = services.canonicalize_bootstrap_address_or_die(address)
    except ConnectionError as exc:
        raise NodeError(f"--cluster {address}: no Ray runs on this machine; start one (ray up cluster.yaml)") from exc
    except ValueError as exc:
        raise SpecError(f"RAY_ADDRESS: give `auto` or HOST:PORT ({exc})") from exc  # which `auto` stands for
    host, port = host_and_port(found, given_as="RAY_ADDRESS" if address == "auto" else "--cluster")
    try:
        is_grpc = _speaks_grpc(host, port)
    except (OSError, UnicodeError) as exc:  # the latter for a host whose name cannot be one
        raise NodeError(f"--cluster {address}: nobody answers at {found} ({exc}): is the head up? (ray up)") from exc
    if not is_grpc:
        why = f"what listens at {found} is no Ray head, or hangs; a head's port is 6379 unless it was told another"
        raise NodeError(f"--cluster {address}: {why}")
    try:
        GcsClient(address=found)
    except Exception as exc:
        raise _why(address, exc) from exc


def _speaks_grpc(host: str, port: int) -> bool:
    """Whether what listens there answers the preface of HTTP/2 with its settings, as gRPC does; with TLS not asked."""
    with socket.create_connection((host, port), _REACH_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True
        try:
            connection.sendall(_PREFACE)
            with connection.makefile("rb") as stream:
                frame = stream.read(9)
        except OSError:
            return False
        return len(frame) == 9 and frame[3] == _SETTINGS  # noqa: PLR2004 - length of a frame's header


def _why(address: str, exc: BaseException) -> BaseException:
    if isinstance(exc, AuthenticationError) or "unauthenticated" in str(exc).lower():
        return NodeError(f"--cluster {address}: it refuses us: put the cluster's token into ~/.ray/auth_token")
    if isinstance(exc, RayError | ConnectionError | RuntimeError):
        return NodeError(f"--cluster {address}: cannot join: {str(exc).strip().splitlines()[0]}")
    return exc


def listed(*, ours: bool = True) -> list[dict[str, Any]]:
    """Nodes of the cluster that are alive (and, if `ours`, made to be owned), as Ray describes them."""
    every: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in every if node["Alive"] and (not ours or node["Resources"].get(RESOURCE))]


def named(nodes: Iterable[dict[str, Any]], age: Callable[[str], int] = lambda _: 0) -> dict[str, dict[str, Any]]:
    """Nodes by what they are called in records: the same after a restart of Ray, which gives them other ids.

    That is their label (two Rays on one machine need one each), or their host's name; cloned machines that share it
    have their address with it. For some time after a restart Ray lists the dead node, too: of two in one place the one
    whose id has the lowest `age` is taken.
    """
    by_place = {}
    for node in sorted(nodes, key=lambda node: -age(node["NodeID"])):
        by_place[_label(node) or (node["NodeManagerHostname"], node["NodeManagerAddress"])] = node
    hosts = Counter(node["NodeManagerHostname"] for node in by_place.values() if not _label(node))
    return {_name(node, alone=hosts[node["NodeManagerHostname"]] < 2): node for node in by_place.values()}  # noqa: PLR2004


def _label(node: dict[str, Any]) -> str:
    return str(node.get("Labels", {}).get(NAME_LABEL) or "")


def _name(node: dict[str, Any], *, alone: bool) -> str:
    host = str(node["NodeManagerHostname"])
    return _label(node) or (host if alone else f"{host}@{node['NodeManagerAddress']}")


def ask_every_node(
    address: str, question: Callable[[], Any], timeout_s: float, straggle_s: float | None = None
) -> dict[str, Any]:
    """Call `question` on every node with the resource ``eagle_node``, also on those that a study owns.

    Args:
        address: of the cluster.
        question: what each node is to do.
        timeout_s: for all to answer; what is waited for is logged.
        straggle_s: nodes that are so much later than half of them, and by twice their time, are not waited for.

    Returns:
        Each node's answer, or, as text, why there is none, by the node's name.

    Raises:
        NodeError: there is no cluster at `address`.
    """
    join(address)
    try:
        asked = {name: _on_node(question, node["NodeID"]) for name, node in named(listed()).items()}
        _await_answers(asked, timeout_s, straggle_s)
        return {name: _answer_of(reference) for name, reference in asked.items()}
    finally:
        ray.shutdown()


def _await_answers(asked: dict[str, Any], timeout_s: float, straggle_s: float | None) -> None:
    began, deadline, tell_at = time.monotonic(), timeout_s, _TELL_S
    left = list(asked.values())
    while left and (passed := time.monotonic() - began) < deadline:
        done, left = ray.wait(list(asked.values()), num_returns=len(asked), timeout=min(1.0, deadline - passed))
        passed = time.monotonic() - began
        if straggle_s is not None and deadline == timeout_s and len(done) >= len(asked) / 2:
            deadline = min(timeout_s, passed + max(straggle_s, 2 * passed))
        if left and passed >= tell_at:
            late = ", ".join(name for name, reference in asked.items() if reference in left)
            _log.warning("no answer after %.0f s from %s; at most %.0f s more", passed, late, deadline - passed)
            tell_at *= 3


@dataclass(frozen=True)
class NodeView:
    """What a node of a running cluster does now.

    Attributes:
        state: ``free``, ``owned`` (between two trials), ``busy``, or ``no answer``.
        since: of the state, in seconds since the epoch; 0 where that is not known.
        job: the trial that runs.
        detail: the last thing that the trial told.
    """

    name: str
    address: str
    gpus: int
    state: str = "free"
    since: float = 0.0
    job: Job | None = None
    detail: str = ""


def look(address: str) -> list[NodeView]:
    """Every node of the cluster at `address` that studies may use; raises `NodeError` when there is none there."""
    join(address, NAMESPACE)
    try:
        owners = _owners()
        views = [
            NodeView(name, node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
            for name, node in named(listed()).items()
        ]
        asked = {view.name: owners[view.name].doing.remote() for view in views if view.name in owners}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_REACH_S) if asked else None
        return sorted((_seen(view, asked.get(view.name)) for view in views), key=lambda view: view.name)
    finally:
        ray.shutdown()


def _owners() -> dict[str, Any]:
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE:
            with suppress(ValueError):  # it ended meanwhile
                found[actor["name"].rpartition(" ")[0]] = ray.get_actor(actor["name"], NAMESPACE)
    return found


def _seen(view: NodeView, asked: Any) -> NodeView:
    if asked is None:
        return view
    try:
        job, since, detail = ray.get(asked, timeout=0)
    except RayError:
        return replace(view, state="no answer")
    return replace(view, state="busy" if job else "owned", since=since, job=job, detail=detail if job else "")


def _on_node(question: Callable[[], Any], node_id: str) -> Any:
    """Start it there, with no claim on CPUs or GPUs, and with the GPUs that the node has to be seen."""
    options = {
        "num_cpus": 0,
        "max_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        "runtime_env": {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
    }

    def call() -> Any:
        return question()

    return ray.remote(call).options(**options).remote()


def _answer_of(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=0)
    except GetTimeoutError:
        return "it did not answer in time"
    except RayError as exc:
        return f"it did not answer: {str(exc).strip().splitlines()[-1]}"
