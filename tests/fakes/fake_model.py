"""What the fake server computes nothing of: its flags, its log, and the faults that come after so many chunks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

SERIOUS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def say(text):
    """One line of SGLang's log."""
    sys.stdout.write(time.strftime(f"[%Y-%m-%d %H:%M:%S] {text}\n"))
    sys.stdout.flush()


@dataclass
class Model:
    """What would be computed, and how far the asked-for faults have come."""

    args: argparse.Namespace
    faults: dict
    scheduler: subprocess.Popen
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: int = 0
    chunks: int = 0

    def tree_too_small(self):
        """Whether topk + (steps - 1) * topk**2 candidates are fewer than the draft tokens after the root."""
        if not self.args.speculative_algorithm:
            return False
        steps, topk, tokens = (getattr(self.args, name) for name in SERIOUS)
        return tokens - 1 > topk + (steps - 1) * topk**2

    @property
    def steps(self):
        """Draft steps; 0 in plain decoding."""
        return self.args.speculative_num_steps if self.args.speculative_algorithm else 0

    def chunk(self):
        """Count a chunk and let a fault that is due happen."""
        time.sleep(float(self.faults.get("round_ms") or 1) / 1000)
        with self.lock:
            self.chunks += 1
            at = self.chunks
        if "kill_scheduler" in self.faults and at >= int(self.faults["kill_scheduler"]):
            self.scheduler.kill()
        if "die" in self.faults and at >= int(self.faults["die"]):
            die("RuntimeError: CUDA error: an illegal memory access was encountered")


def die(error):
    """End as a server whose scheduler failed."""
    say("Scheduler hit an exception: Traceback (most recent call last):")
    sys.stdout.write(f'  File "scheduler.py", line 1, in run_scheduler_process\n{error}\n\n')
    say("Received sigquit from a child process. It usually means the child failed.")
    os._exit(1)
