"""A Ray of several nodes on this machine, on loopback only: ``python -m raytune_eagle.nodes.local_ray N FILE [GPUS]``.

It runs as a process of its own under a guard, with RAY_TMPDIR set to a folder of its own: when its owner dies, however
it dies, every process of this Ray goes and the guard removes the folder. FILE is written when all nodes are up and
holds the address.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray listens on the outward address, even when told 127.0.0.1 (2.60)
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # its default of 15 goes on to the server and to the client that times it
}
"""Set before Ray is imported, here and in the driver."""
_LOOK_S = 1.0


def environment_for(address: str) -> dict[str, str]:
    """What a driver of the Ray at `address` must have set: of one on loopback what that one has."""
    return ENVIRONMENT if address.startswith("127.") else {"RAY_USAGE_STATS_ENABLED": "0"}


def node_name(index: int) -> str:
    """Name of a local node: the same in every run, so that its baseline is known again."""
    return f"local-{index}"


def gpu_indices(index: int, gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES of a local node: disjoint slices of what this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_gpus = visible.split(",") if visible else [str(i) for i in range((index + 1) * gpus)]
    return ",".join(all_gpus[index * gpus : (index + 1) * gpus])


def main(argv: list[str]) -> None:
    """Start the nodes, write the address, and start anew those whose raylet died, until the guard ends us."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - the environment above must be set before

    count, ready, gpus = int(argv[0]), Path(argv[1]), int(argv[2]) if argv[2:] else 0
    cluster = Cluster()
    nodes = [cluster.add_node(**_options(index, gpus, head=index == 0)) for index in range(count)]
    partial = ready.with_suffix(".tmp")
    partial.write_text(cluster.address)
    partial.rename(ready)
    while True:
        time.sleep(_LOOK_S)
        for index, node in enumerate(nodes):
            if any(kind == "raylet" for kind, _ in node.dead_processes()):
                if node is not cluster.head_node:  # whose other processes serve the rest
                    cluster.remove_node(node, allow_graceful=False)
                nodes[index] = cluster.add_node(**_options(index, gpus, head=False))


def _options(index: int, gpus: int, *, head: bool) -> dict[str, Any]:
    from raytune_eagle.nodes.joining import NAME_LABEL, RESOURCE  # noqa: PLC0415 - the environment must be set before

    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "object_store_memory": 100 * 2**20,
        "node_ip_address": "127.0.0.1",
        "resources": {RESOURCE: 1.0},
        "labels": {NAME_LABEL: node_name(index)},
    }
    if head:
        options["include_dashboard"] = False
    if gpus:
        options["env_vars"] = {"CUDA_VISIBLE_DEVICES": gpu_indices(index, gpus)}
    return options


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(sys.argv[1:])
