"""One cluster of three hosts for all tests of the lab; marked `lab`, and skipped by nobody: `make lab` runs them."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from lab.hosts import NAMESPACES, Lab
from lab.ray_cluster import RayCluster
from lab.study_run import StudyRun
from lab.waiting import await_true

MEASURED: dict[str, float] = {}
PROGRAMS = ("sshd", "rsync", "ip", "iptables", "nsenter", "unshare", "ss")


@pytest.fixture(scope="session")
def lab():
    missing = [program for program in PROGRAMS if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if os.geteuid() or missing:
        pytest.fail(f"the lab needs root{f' and {missing}' if missing else ''}: run `make lab` as root", pytrace=False)
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.fail(f"the lab needs namespaces, and this machine refuses them: {tried.stderr}", pytrace=False)
    with Lab(3) as lab:
        yield lab


@pytest.fixture(scope="session")
def cluster(lab):
    """`ray up` as a user types it, and every host a node within a minute and a half."""
    cluster, began = RayCluster(lab), time.monotonic()
    cluster.begin()
    MEASURED["ray up"] = time.monotonic() - began
    MEASURED["ray up: all three nodes, after that"] = cluster.await_nodes()
    return cluster


@pytest.fixture
def study(cluster):
    """Makes studies on a cluster that is whole, and ends those that a failed test left."""
    hosts = cluster.lab.hosts
    await_true(lambda: all(host.find("raylet/raylet") for host in hosts), 120, "a host without Ray")
    made = []

    def make(*args, **options):
        made.append(StudyRun(cluster, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.kill()
    for host in hosts:
        host.heal() if host.runs else host.boot()


@pytest.fixture(scope="session")
def times():
    """Seconds that were measured, by what; told at the end."""
    return MEASURED


def pytest_terminal_summary(terminalreporter):
    """The figures of docs/reliability.md; also as JSON, added to the file that LAB_TIMES names."""
    for what, seconds in MEASURED.items():
        terminalreporter.write_line(f"{seconds:8.1f} s  {what}")
    if MEASURED and "LAB_TIMES" in os.environ:
        with Path(os.environ["LAB_TIMES"]).open("a", encoding="utf-8") as out:
            out.write(json.dumps(MEASURED) + "\n")
