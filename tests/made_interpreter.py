"""An interpreter for `engine.python` that says it has some SGLang; what it says is in files beside it."""

import json
import shutil
from pathlib import Path

FAKE = Path(__file__).parent / "fakes" / "interpreter.sh"
FLAG = {"bare": False, "kind": "int", "choices": None}
SWITCH = {"bare": True, "kind": None, "choices": None}
FLAGS = {
    "tp-size": FLAG,
    "page-size": FLAG,
    "cuda-graph-max-bs-decode": FLAG,
    "cuda-graph-max-bs-prefill": FLAG,
    "disable-custom-all-reduce": SWITCH,
    "quantization": {"bare": False, "kind": "str", "choices": ["awq", "awq_marlin", "compressed-tensors", "fp8"]},
}


def make_interpreter(folder, version="0.5.20", flags=FLAGS, pins=None, **installed):
    """Its path; `installed` gives versions of torch, nccl (CUDA 13) and cudnn."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"python": "3.11.7", "home": str(folder), "sglang": version, "pins": pins or {}}
    about |= {"torch": installed.get("torch"), "nvidia-nccl-cu12": None, "nvidia-nccl-cu13": installed.get("nccl")}
    about |= {"nvidia-cudnn-cu12": installed.get("cudnn")}
    (folder / "about.json").write_text(json.dumps(about))
    (folder / "flags.json").write_text(json.dumps({"version": version, "flags": flags}))
    return Path(shutil.copy(FAKE, folder / "python"))


def times_asked(python):
    """How often it was asked for flags."""
    asked = python.parent / "asked.txt"
    return len(asked.read_text().splitlines()) if asked.exists() else 0
