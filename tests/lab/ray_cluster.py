"""The project's cluster.yaml on the hosts of a lab, by the real ``ray up`` over SSH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml
from lab.hosts import ROOT, Host, Lab
from lab.waiting import await_true
from readme import commands

CACHE = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
ACTIVATE = f"source {sys.prefix}/bin/activate; export PYTHONPATH={ROOT} XDG_CACHE_HOME={CACHE}"
"""With a cache that all hosts share, as they share this machine: SGLang is asked for its flags once."""
MARKED = "source ~/raytune-env/bin/activate"


def adapted(lab: Lab) -> Path:
    """The file with what it tells people to change changed, and nothing else."""
    text = (ROOT / "cluster.yaml").read_text()
    assert MARKED in text
    config = yaml.safe_load(text.replace(MARKED, ACTIVATE))
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
