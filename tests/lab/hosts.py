"""Several hosts on one machine: each has its own namespaces, address, sshd, home, /tmp and process table.

A host is a net, mount, pid, uts and ipc namespace with ``host_init.sh`` as pid 1; the operator is one more, with the
bridge that they are plugged into and no way out of it. Nothing is named in the machine's own namespaces: when the last
process of a host is dead, the kernel takes back its mounts and its interface. A guard ends them all when the tests die.

Needs root, and from Debian openssh-server, rsync, iproute2, iptables and util-linux (`make lab` installs them).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from raytune_eagle.engines.guarded import Guarded

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("host_init.sh")
NET = "10.77.0"
BOOT_S = 20.0
NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc")


class Host:
    """One machine of the lab, or the operator."""

    def __init__(self, lab: Lab, name: str, number: int) -> None:
        self.lab, self.name, self.address = lab, name, f"{NET}.{number}"
        self.mac = f"02:00:0a:4d:00:{number:02x}"  # the same after each boot, as that of a real card
        self.folder = lab.folder / name
        self._guarded: Guarded | None = None
        self._init = 0

    @property
    def home(self) -> Path:
        """Its root's home; it survives a power-off, unlike /tmp."""
        return self.folder / "home"

    @property
    def runs(self) -> bool:
        """Whether it has power."""
        return self._guarded is not None

    def boot(self) -> None:
        """Start pid 1 and return when sshd runs."""
        for name in ("home", "etc"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not (self.folder / "etc" / "host_key").exists():
            make_key(self.folder / "etc" / "host_key")
        words = [self.name, self.address, str(self.lab.folder), self.lab.peers, self.lab.keep]
        with (self.folder / "console.log").open("ab") as console:
            command = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--propagation", "private", "bash", str(INIT)]
            self._guarded = Guarded([*command, *words], stdout=console, grace_s=0).start()
        self._init = self._await_init()
        self.lab.plug_in(self, self._init)
        self._await(["test", "-e", "/run/ready"])

    def _await_init(self) -> int:
        children = Path(f"/proc/{self._guarded.pid}/task/{self._guarded.pid}/children")
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline:
            if (found := children.read_text().split()) and _in_own_namespace(int(found[0])):
                return int(found[0])
            time.sleep(0.01)
        raise AssertionError(f"{self.name} did not boot: {self.console()}")

    def _await(self, command: list[str]) -> None:
        deadline = time.monotonic() + BOOT_S
        while self.run(*command, check=False).returncode:
            assert time.monotonic() < deadline, f"{self.name} did not boot: {self.console()}"
            time.sleep(0.05)

    def console(self) -> str:
        """What its pid 1 and sshd said."""
        return (self.folder / "console.log").read_text(errors="replace")

    def command(self, *words: str) -> list[str]:
        """Words that run `words` inside."""
        inside = ["nsenter", "--target", str(self._init), *NAMESPACES, "env", "-i", f"HOME={self.home}", "USER=root"]
        path = f"PATH={os.environ['PATH']}"
        return [*inside, "LANG=C.UTF-8", path, "RAY_USAGE_STATS_ENABLED=0", "bash", "-c", 'cd; exec "$@"', "-", *words]

    def run(self, *words: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command inside; its output is in the error when it fails."""
        done = subprocess.run(
            self.command(*map(str, words)), check=False, capture_output=True, text=True, timeout=timeout
        )
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}$ {shlex.join(map(str, words))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done

    def shell(self, script: str, *, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a line as someone who has logged in."""
        return self.run("bash", "-c", f"source ~/.bashrc; {script}", check=check, timeout=timeout)

    def start(self, script: str, log: Path) -> subprocess.Popen[bytes]:
        """Run a line in the background, as someone who has logged in; its output goes to `log`."""
        with log.open("ab") as out:
            words = self.command("bash", "-c", f"source ~/.bashrc; exec {script}")
            return subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def processes(self) -> dict[int, str]:
        """Command line of each process, but for pid 1, sshd and whoever looks."""
        listed = self.run("ps", "-eo", "pid=,args=").stdout.splitlines()
        found = dict(line.strip().split(" ", 1) for line in listed)
        ours = ("host_init.sh", "sshd", "ps -eo", "sleep 0.2")
        return {int(pid): words for pid, words in found.items() if not any(name in words for name in ours)}

    def find(self, text: str) -> list[int]:
        """Processes whose command line has `text`, in the order of their pids."""
        return sorted(pid for pid, words in self.processes().items() if text in words)

    def kill(self, text: str, number: int = 9) -> int:
        """Signal the only process whose command line has `text`."""
        pids = self.find(text)
        assert len(pids) == 1, f"{text} on {self.name}: {pids}"
        self.run("kill", f"-{number}", str(pids[0]))
        return pids[0]

    def cut(self, *, silent: bool = False) -> None:
        """Take the cable out; `silent`: the link stays up, and every packet is lost."""
        if silent:
            for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o")):
                self.run("iptables", "-I", chain, side, "eth0", "-j", "DROP")
        else:
            self.lab.operator.run("ip", "link", "set", f"v-{self.name}", "down")

    def heal(self) -> None:
        """Undo `cut`."""
        self.run("iptables", "-F")
        self.lab.operator.run("ip", "link", "set", f"v-{self.name}", "up")

    def power_off(self) -> None:
        """All processes are dead at once and say goodbye to nobody."""
        if self is not self.lab.operator:
            self.lab.operator.run("ip", "link", "del", f"v-{self.name}")
        self.end()

    def end(self) -> None:
        """Kill pid 1: the kernel kills the rest."""
        if self._guarded is not None:
            self._guarded.stop()
        self._guarded, self._init = None, 0


class Lab:
    """An operator and `count` hosts named h1, h2, …; a context manager."""

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rte-lab-", dir="/var/tmp"))
        self.key = self.folder / "key"
        self.keep = f"{ROOT}:{sys.prefix}"
        self.operator = Host(self, "op", 254)
        self.hosts = [Host(self, f"h{number}", number) for number in range(1, count + 1)]
        self.peers = " ".join(f"{host.address}={host.name}" for host in [self.operator, *self.hosts])

    def __enter__(self) -> Self:
        make_key(self.key)
        try:
            self.operator.boot()
            for host in self.hosts:
                host.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plug_in(self, host: Host, init: int) -> None:
        """Give a host that boots its cable to the bridge; the operator has the bridge itself."""
        if host is self.operator:
            host.run("ip", "link", "add", "eth0", "type", "bridge")
            return
        cable = f"v-{host.name}"
        # the operator's process table does not have the host's: by way of this machine's own
        inside = ["nsenter", "--target", str(self.operator._init), "--net"]
        peer = ["peer", "name", "eth0", "address", host.mac, "netns", str(init)]
        words = ["ip", "link", "add", cable, "type", "veth", *peer]
        subprocess.run([*inside, *words], check=True, capture_output=True)
        self.operator.run("ip", "link", "set", cable, "master", "eth0", "up")

    def close(self) -> None:
        """Power everything off; nothing is left."""
        for host in [*self.hosts, self.operator]:
            host.end()
        shutil.rmtree(self.folder)


def make_key(path: Path) -> None:
    """A key pair without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", path], check=True)


def _in_own_namespace(pid: int) -> bool:
    """Whether unshare has got as far as its child."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino != Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return False
