"""One cluster of three hosts for all tests of the lab; marked `lab`, and skipped by nobody: `make lab` runs them."""

import json
import os
import shutil
from pathlib import Path

import pytest
from lab.hosts import Lab
from lab.ray_cluster import RayCluster
from lab.study_run import StudyRun

MEASURED: dict[str, float] = {}
PROGRAMS = ("sshd", "rsync", "ip", "iptables", "nsenter", "unshare", "ss")


@pytest.fixture(scope="session")
def lab():
    missing = [program for program in PROGRAMS if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if os.geteuid() or missing:
        pytest.fail(f"the lab needs root{f' and {missing}' if missing else ''}: run `make lab` as root", pytrace=False)
    with Lab(3) as lab:
        yield lab


@pytest.fixture(scope="session")
def cluster(lab):
    cluster = RayCluster(lab)
    cluster.begin()
    return cluster


@pytest.fixture
def study(cluster):
    """Makes studies, and ends those that a failed test left."""
    made = []

    def make(*args, **options):
        made.append(StudyRun(cluster, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.kill()


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
