"""The project's own cluster.yaml by the real `ray up` over SSH, and whole studies on it."""

import re
import time

import pytest
from lab.hosts import ROOT
from lab.study_run import COMMAND, StudyRun
from lab.waiting import await_true

SPEC_FILE = ROOT / "search_spaces" / "tiny_cpu.yaml"
pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def test_study_on_all_hosts(study, times):
    """One study over three hosts: every trial once, every node used, logs of remote servers kept, nothing left."""
    began = time.monotonic()
    run = study("whole", 12, round_ms=5).start()
    run.end(150)
    times["12 trials on 3 nodes"] = time.monotonic() - began
    run.check_whole(12)
    records = run.records()
    assert {record.node for record in records} == {"h1", "h2", "h3"}
    assert all(record.outcome.status == "completed" for record in records)
    assert {number: text.count("fired up and ready") for number, text in run.server_logs().items()} == {
        record.number: 1 for record in records
    }
    events = run.events()
    assert {event.node for event in events if event.name == "ready"} == {"h1", "h2", "h3"}


def test_real_server_on_one_host(study, cluster, times):
    """SGLang itself on h2, driven from h1 through Ray; meanwhile nothing listens that docs/cluster.md does not name."""
    began = time.monotonic()
    run = study("real", 3, round_ms=60, real="h2").start()
    run.await_line(r"h2 #\d+ +ready", 240)
    times["SGLang on the CPU, on h2: ready"] = time.monotonic() - began
    found = {host.name: everywhere(host) for host in cluster.lab.hosts}
    run.end(280)
    run.check_whole(3)
    fixed = {name: {port for port in ports if not 20000 <= port < 21000} for name, ports in found.items()}
    ray = {6380, 6381, 6384}
    assert fixed == {"h1": {6379, *ray}, "h2": ray, "h3": ray}, found
    workers = {who.split('"')[1] for ports in found.values() for port, who in ports.items() if 20000 <= port < 21000}
    assert all(name.startswith(("ray::", "python")) for name in workers), found
    measured = [record for record in run.records() if record.node == "h2"]
    assert measured
    assert all(record.outcome.status == "completed" for record in measured)
    logs = run.server_logs()
    assert all("max_total_num_tokens" in logs[record.number] for record in measured)


def everywhere(host):
    """TCP ports of a host that are open on all interfaces, and whose they are."""
    lines = [line.split() for line in host.run("ss", "-ltnpH").stdout.splitlines()]
    places = [(*fields[3].rsplit(":", 1), fields[5]) for fields in lines]
    return {int(port): who for address, port, who in places if address in ("0.0.0.0", "*", "[::]")}


@pytest.fixture(scope="module")
def leak(cluster):
    """A study whose GPU keeps 2,000 MiB after its first trial; that it is given back is waited for for a minute."""
    run = StudyRun(cluster, "leak", 4, gpus=1).start()
    try:
        run.await_trial(cluster.lab.hosts[-1])
        cluster.use_gpu_memory(2000)
        yield run
    finally:
        run.kill()


@pytest.mark.usefixtures("leak")  # its minute passes meanwhile
def test_token_is_asked_for(cluster):
    """Somebody with another token is refused at once; before our line Ray may write one of its own."""
    began = time.monotonic()
    done = cluster.head.shell(
        f"mkdir -p /tmp/other; echo {'0' * 64} > /tmp/other/token; export RAY_AUTH_TOKEN_PATH=/tmp/other/token; "
        f"{COMMAND} doctor {SPEC_FILE} --cluster {cluster.head.address}:6379",
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"raytune-eagle: --cluster \S+: it refuses us: .*token.*", done.stderr.splitlines()[-1])
    assert done.stderr.count("\n") <= 2
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("address", "why"),
    [("10.77.0.1:1", "nobody answers"), ("10.77.0.99:6379", "nobody answers"), ("10.77.0.1:22", "no Ray head")],
)
def test_address_where_no_head_is(cluster, address, why):
    """A wrong address: one line within 15 s, exit 1."""
    began = time.monotonic()
    done = cluster.head.shell(f"{COMMAND} doctor {SPEC_FILE} --cluster {address}", check=False, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert why in done.stderr
    assert time.monotonic() - began < 18


def test_doctor_looks_at_every_node(study, cluster):
    """`doctor --cluster auto` answers for each host by name."""
    done = cluster.head.shell(study("doctor", 3).words("doctor"), check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{host.name}\tok\t" in done.stdout for host in cluster.lab.hosts)


def test_a_gpu_keeps_memory(leak, times):
    """Its node is put aside, as `nodes` tells; its trial is kept; when it is given back the node is used again."""
    leak.await_line("h3 .*put aside.*: GPU .*2000 MiB", 90)
    told, kept = time.monotonic(), len(leak.records())
    leak.await_line("h3 .*put aside.*in use by no process", 40)
    nodes = f"{COMMAND} nodes --results {leak.folder}/results"
    head = leak.cluster.head
    await_true(lambda: re.search("h3 .*put aside", head.shell(nodes).stdout), 20, lambda: leak.text()[-3000:])
    assert len(leak.records()) == kept > 0
    leak.cluster.use_gpu_memory(0)
    leak.end(120)
    times["GPU that kept memory: 4 trials done, after it was told"] = time.monotonic() - told
    leak.check_whole(4)
    assert all(record.outcome.status == "completed" for record in leak.records())
