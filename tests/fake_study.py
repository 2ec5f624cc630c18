"""A study of the command whose server is the fake one: whole launches, in seconds and without a model."""

import sys
from pathlib import Path

FAKE = Path(__file__).parent / "fakes" / "launch_server.py"
SPEC = """
name: faked
engine: {{model: builtin:tiny, draft: {draft}, python: {python}, env: {{RAYTUNE_FAKE: "{faults}"}}}}
node: {{gpus: 0}}
workload: {{prompts: builtin:tiny, max_new_tokens: 8, max_passes: 2, min_passes: 2}}
space: {{speculative: {{num_steps: {{int: [1, 5]}}, eagle_topk: [1, 2], num_draft_tokens: {{int: [2, 8]}}}}}}
search: {{sampler: random}}
confirm: {{top: 0}}
budget: {{trials: {trials}}}
"""


def fake_study(folder, trials=3, draft="builtin:tiny", faults="round_ms=1"):
    """Path of its spec; the interpreter is this one, but for SGLang's CPU layer, which is the fake server."""
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$1 $2" = "-m raytune_eagle.engines.cpu" ]; then shift 2; exec {sys.executable} {FAKE} "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (folder / "spec.yaml").write_text(SPEC.format(python=python, trials=trials, draft=draft, faults=faults))
    return folder / "spec.yaml"
