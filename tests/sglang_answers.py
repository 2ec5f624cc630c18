"""Asks tests/sglang_resolution.py, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def ask(points):
    """SGLang's answers, from one process of its own."""
    lines = "".join(json.dumps(point) + "\n" for point in points)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent)}
    script = [sys.executable, HERE / "sglang_resolution.py"]
    done = subprocess.run(script, input=lines, capture_output=True, text=True, env=env, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
