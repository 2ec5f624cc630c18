#!/usr/bin/env python3
"""Starts a throw-away SGLang server with made-up weights, so that kernels are compiled before the real one needs them.

usage: gpu_warm.py DRAFT FOLDER PORT SECONDS

The target is a Llama of the draft's shapes with LAYERS layers (compiled kernels depend on shapes, not on depth or
values). Ends by itself: when the server has answered one request, or after SECONDS; FOLDER/pid says whom to end sooner.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

LAYERS = 30
OPTIONS = {
    "load-format": "dummy",
    "speculative-draft-load-format": "auto",
    "skip-tokenizer-init": None,
    "dtype": "bfloat16",
    "speculative-algorithm": "EAGLE3",
    "speculative-num-steps": "3",
    "speculative-eagle-topk": "4",
    "speculative-num-draft-tokens": "8",
    "host": "127.0.0.1",
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-prefill-cuda-graph": None,
    "cuda-graph-max-bs-decode": "8",
    "max-running-requests": "16",
    "context-length": "2048",
    "max-total-tokens": "65536",
    "mem-fraction-static": "0.5",
    "random-seed": "0",
}
REQUEST = {"input_ids": list(range(10, 26)), "sampling_params": {"temperature": 0, "max_new_tokens": 16}}


def write_target(draft: Path, folder: Path) -> None:
    """A target's config.json, made from the draft's."""
    config = json.loads((draft / "config.json").read_text())
    for key in ("draft_vocab_size", "eagle_config"):
        config.pop(key, None)
    config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "tie_word_embeddings": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def command_line(options: dict[str, str | None]) -> list[str]:
    """Options as arguments."""
    return [part for name, value in options.items() for part in (f"--{name}", value) if part is not None]


def answers(url: str, body: dict[str, object] | None = None) -> bool:
    """Whether a request gets 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return bool(response.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False


def serve_once(server: subprocess.Popen[bytes], url: str, deadline: float) -> bool:
    """Waits until the server is up and has answered."""
    while time.monotonic() < deadline and server.poll() is None:
        if answers(f"{url}/health"):
            return answers(f"{url}/generate", REQUEST)
        time.sleep(0.5)
    return False


def main() -> None:
    """Reads the command line, starts the server, waits, ends it."""
    if len(sys.argv) != 5:  # noqa: PLR2004
        sys.exit(str(__doc__).split("\n\n")[1])
    draft, folder, port, seconds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    start = time.monotonic()
    write_target(draft, folder)
    (folder / "pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    options = {**OPTIONS, "model-path": str(folder), "speculative-draft-model-path": str(draft), "port": port}
    server = subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server", *command_line(options)], start_new_session=True
    )
    try:
        good = serve_once(server, f"http://127.0.0.1:{port}", start + seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)
    print(f"warm-up {'done' if good else 'NOT done'}: {time.monotonic() - start:.1f} s", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
