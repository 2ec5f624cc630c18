"""A Ray of several nodes on this machine, on loopback only: ``python -m raytune_eagle.nodes.local_ray N FILE [GPUS]``.

It runs as a process of its own under a guard, with RAY_TMPDIR set to a folder of its own: when its owner dies, however
it dies, every process of this Ray goes and the guard removes the folder. FILE is written when all nodes are up and
holds the address.
"""

from __future__ import annotations

import os
import signal
import sys
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


def node_name(index: int) -> str:
    """Name of a local node: the same in every run, so that its baseline is known again."""
    return f"local-{index}"


def gpu_indices(index: int, gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES of a local node: disjoint slices of what this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_gpus = visible.split(",") if visible else [str(i) for i in range((index + 1) * gpus)]
    return ",".join(all_gpus[index * gpus : (index + 1) * gpus])


def main(argv: list[str]) -> None:
    """Start the nodes, write the address, and wait to be ended by the guard."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - the environment above must be set before

    from raytune_eagle.nodes.ray import NAME_LABEL, RESOURCE  # noqa: PLC0415 - likewise

    count, ready, gpus = int(argv[0]), Path(argv[1]), int(argv[2]) if argv[2:] else 0
    cluster = Cluster()
    for index in range(count):
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": gpus,
            "object_store_memory": 100 * 2**20,
            "node_ip_address": "127.0.0.1",
            "resources": {RESOURCE: 1.0},
            "labels": {NAME_LABEL: node_name(index)},
        }
        if index == 0:
            options["include_dashboard"] = False
        if gpus:
            options["env_vars"] = {"CUDA_VISIBLE_DEVICES": gpu_indices(index, gpus)}
        cluster.add_node(**options)
    partial = ready.with_suffix(".tmp")
    partial.write_text(cluster.address)
    partial.rename(ready)
    while True:
        signal.pause()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(sys.argv[1:])
