"""SGLang's own answers to launches, many in one process: the other side of tests/test_rules_sglang.py.

    python tests/sglang_resolution.py < points.jsonl > answers.jsonl

Runs in an interpreter with SGLang 0.5.20 and needs no GPU: where a point says which GPUs there are, SGLang is told so
(``override_platform``, the switch of its own tests). A point is ``{"argv": […], "env": {…}, "platform": {…}}``.
"""

import hashlib
import json
import logging
import os
import sys
import warnings

READ_NOWHERE = {"num_continuous_decode_steps"}
KEPT = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "attention_backend",
    "page_size",
    "max_running_requests",
    "sampling_backend",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "speculative_adaptive",
)


def answers(points):
    """One answer per point: why it is refused, or what it becomes and a hash over all of that."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from raytune_eagle.engines.cpu import shim  # noqa: PLC0415

    shim.install()  # what SGLang imports and a machine without a GPU does not have
    from sglang.srt.arg_groups.overrides import resolved_view  # noqa: PLC0415
    from sglang.srt.arg_groups.validation_hook import check_server_args  # noqa: PLC0415
    from sglang.srt.runtime_context import override_platform  # noqa: PLC0415
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    clean = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    for point in points:
        os.environ.clear()
        os.environ.update(clean | point["env"])
        try:
            with override_platform(**point["platform"]):
                args = prepare_server_args(point["argv"])
                args.resolve_once()
                check_server_args(args)  # as launch_server does
                view = resolved_view(args)
                yield resolved(args, view)
        except (SystemExit, Exception) as exc:  # noqa: BLE001
            yield {"refused": f"{type(exc).__name__}: {exc}"[:160]}


def resolved(args, view):
    from sglang.srt.arg_groups.arg_utils import record_fields  # noqa: PLC0415

    names = [f.name for f in record_fields(type(args)) if not f.name.startswith("_") and f.name not in READ_NOWHERE]
    values = {name: getattr(view, name) for name in names}
    graphs = values.pop("cuda_graph_config", None)
    off = str(getattr(graphs.decode.backend, "value", graphs.decode.backend)).lower() == "disabled"
    if off or (view.device == "cpu" and view.attention_backend == "torch_native"):
        for name in [n for n in values if "cuda_graph" in n]:  # nothing is captured, whatever the sizes
            del values[name]
        graphs = None
    if view.tp_size == 1:
        del values["disable_custom_all_reduce"]  # nothing to reduce
    values["random_seed"] = values["nccl_port"] = values["port"] = None  # drawn anew each time
    env = {n: v for n, v in os.environ.items() if n.startswith("NCCL_")}
    text = json.dumps([values, repr(graphs), env], sort_keys=True, default=repr)
    kept = {name: getattr(view, name) for name in KEPT}
    return {"hash": hashlib.blake2s(text.encode(), digest_size=6).hexdigest(), **kept, "env": env}


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints goes elsewhere
    for answer in answers(json.loads(line) for line in sys.stdin):
        out.write(json.dumps(answer) + "\n")
        out.flush()
