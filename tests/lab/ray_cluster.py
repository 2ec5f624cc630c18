"""The project's cluster.yaml on the hosts of a lab, by the real ``ray up`` over SSH."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import yaml
from lab.hosts import ROOT, Host, Lab
from lab.waiting import await_true
from readme import commands

CACHE = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
NVML = ROOT / "tests" / "fakes" / "nvml"
ACTIVATE = f"source {sys.prefix}/bin/activate; export PYTHONPATH={ROOT}:{NVML} XDG_CACHE_HOME={CACHE}"
"""With a cache that all hosts share, as they share this machine: SGLang is asked for its flags once."""
MARKED = "source ~/raytune-env/bin/activate"
PORTS = "--min-worker-port"


def adapted(lab: Lab) -> Path:
    """The file with what it tells people to change changed, and with GPUs given, which Ray would find by itself."""
    text = (ROOT / "cluster.yaml").read_text()
    assert MARKED in text
    assert PORTS in text
    config = yaml.safe_load(text.replace(MARKED, ACTIVATE).replace(PORTS, f"$LAB_GPUS {PORTS}"))
    head, *workers = (host.address for host in lab.hosts)
    config["provider"] |= {"head_ip": head, "worker_ips": workers}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(lab.key)}
    path = lab.folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


class RayCluster:
    """What the operator does with it."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.file = lab, adapted(lab)
        (lab.operator.home / ".bashrc").write_text(f"{ACTIVATE}\n")
        self.nvml = lab.folder / "nvml.json"
        self.use_gpu_memory(0)
        (lab.hosts[-1].home / ".bashrc").write_text(f"export NVML_FAKE={self.nvml} LAB_GPUS=--num-gpus=1\n")

    def use_gpu_memory(self, mib: int) -> None:
        """What NVML says of the only GPU, a fake one of the last host, from now on."""
        gpu = {"used": mib, "total": 80_000, "pids": {}}
        new = self.nvml.with_suffix(".new")
        new.write_text(json.dumps({"arch": [9, 0], "nvlink": True, "gpus": [gpu]}))
        new.rename(self.nvml)

    @property
    def head(self) -> Host:
        """The first host."""
        return self.lab.hosts[0]

    def begin(self) -> None:
        """Start it as the README says, word for word."""
        for line in commands("lab"):
            self.lab.operator.shell(f"cd {self.file.parent}; {line}", timeout=180)

    def up(self) -> None:
        """Start it again, or repair it."""
        self.lab.operator.shell(f"ray up -y --no-config-cache {self.file}", timeout=180)

    def await_nodes(self) -> float:
        """Wait until every host is a node; returns the seconds that this took."""
        count = "import ray; ray.init('auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        return await_true(
            lambda: self.head.shell(f'python -c "{count}" 2>/dev/null', check=False).stdout.strip() == "3",
            90,
            lambda: self.head.shell("ray status", check=False).stdout,
        )

    def down(self) -> None:
        """End it, as a user would."""
        self.lab.operator.shell(f"ray down -y {self.file}", timeout=120)
