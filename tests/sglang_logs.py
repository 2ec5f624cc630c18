"""The kept logs of SGLang, and what those of failures are classed as."""

from __future__ import annotations

from pathlib import Path

from raytune_eagle.failures.classes import RULES

ASSETS = Path(__file__).parent / "assets" / "logs"
FAILURES = {
    "fail_0516_h200_bad_argument.log": "bad_argument",
    "fail_0516_h200_model_missing.log": "model_missing",
    "fail_0516_h200_oom_graph_capture.log": "oom_graph_capture",
    "fail_0516_h200_port_taken.log": "port_taken",
    "fail_0516_h200_oom_kv.log": "oom_kv",
    "fail_0516_h200_tree_too_small.log": "tree_too_small",
    "fail_0516_h200x2_rank_lost.log": "rank_lost",
    "fail_0516_h200x4_rank_lost.log": "rank_lost",
    "fail_0520_cpu_tree_too_small.log": "tree_too_small",
    "fail_0520_cpu_draft_as_llama.log": "shape_mismatch",
    "fail_0520_cpu_tree_too_shallow.log": "tree_too_shallow",
    "tensorrt-llm_issue_953_2024-01_nccl218_error.log": "nccl_invalid_usage",
    "fail_0516_h200_killed_by_os.log": "killed_by_os",
    "fail_0520_cpu_segfault.log": "crashed",
    **{
        f"made_{rule.name}.log": rule.name
        for rule in RULES
        if rule.name not in ("tree_too_small", "tree_too_shallow", "oom_kv", "rank_lost", "crashed")
    },
}


def read(name):
    """A log of tests/assets."""
    return (ASSETS / name).read_text(encoding="utf-8")
