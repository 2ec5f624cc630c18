"""Gates on what the server says of itself: its arguments, and how its log tells that it started."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from raytune_eagle.gates.base import Seen, draft_folder, failed, passed, unknown, warned
from raytune_eagle.logs import OTHER_RANK, lines
from raytune_eagle.model.config import FlagValue
from raytune_eagle.model.measurement import Gate
from raytune_eagle.rules.base import ALIASES

_LOADED = re.compile(r"Load weight end\..*?\btype=(\w+)")
_CAPTURED = re.compile(r"Capture (?:target (?:verify|decode) )?(?:cuda|CUDA) graph begin.*?\bbs[= ]*\[([\d, ]+)\]")
_OF_GRAPHS = re.compile(r"cuda_graph_(backend|max_bs|bs)_(decode|prefill)")
_DESTINATIONS = {
    "decode_context_parallel_size": "dcp_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
    "speculative_algo": "speculative_algorithm",
    "speculative_draft_model": "speculative_draft_model_path",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
    "elastic_ep_join_mode": "ep_join_mode",
    "elastic_ep_join_rank_offset": "ep_join_rank_offset",
    "hierarchical_sparse_attention_extra_config": "hisparse_config",
    "grpc_http_sidecar_port": "smg_http_sidecar_port",
}
"""Arguments that have another name than their flag (SGLang 0.5.20, ``ServerArgs.add_cli_args``)."""

SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
"""Pins how many tokens are accepted, for measurements without a draft of the model."""


def arguments(seen: Seen) -> Iterator[Gate]:
    """Does what runs equal what was asked?"""
    if seen.info:
        yield _resolved_args(seen)
        yield _algorithm(seen)
    else:
        yield unknown("resolved_args", "the server could not be asked for its arguments")
        yield unknown("algorithm", "the server could not be asked for its arguments")
    if seen.config.speculative:
        yield _draft_class(seen)
    yield from _simulated(seen)


def _simulated(seen: Seen) -> Iterator[Gate]:
    """SGLang accepts as many tokens as it is told, whatever the draft said (``eagle_utils.py``, 0.5.16).

    Told of plain decoding too: in such a study text is nowhere the matter, and a target of random weights, all of whose
    calls are close, parts from its own text under another NCCL protocol (seen on four H200s: 31 % began alike).
    """
    if length := seen.config.env.get(SIMULATED):
        yield warned(
            "simulated",
            f"{SIMULATED}={length} pins acceptance: throughput says how long a cycle takes, and nothing of "
            "the draft or the text",
        )


def _resolved_args(seen: Seen) -> Gate:
    """Each flag that was given, beside all places where the server tells it; none of one is no sign that it took."""
    others, untold = [], []
    for flag, asked in seen.flags.items():
        runs = _told(seen.info, flag)
        different = [value for value in runs if not _same(asked, value)]
        if different:
            others.append(f"{flag}: {asked} asked, {different[0]} runs")
        elif not runs and asked not in (None, False):
            untold.append(flag)
    silence = [f"the server does not tell {', '.join(untold)}"] if untold else []
    if others:
        return warned("resolved_args", "; ".join(others + silence))
    return unknown("resolved_args", silence[0]) if silence else passed("resolved_args")


def _told(info: Mapping[str, Any], flag: str) -> list[Any]:
    """What runs of a flag, by its argument and by what the arguments of graphs were gathered in (0.5.16-0.5.23)."""
    name = ALIASES.get(flag, flag).replace("-", "_")
    name = _DESTINATIONS.get(name, name)
    found = [info[name]] if name in info else []
    graphs = info.get("cuda_graph_config")
    if (match := _OF_GRAPHS.fullmatch(name)) and isinstance(graphs, dict):
        phase = graphs.get(match[2])
        found += [phase[match[1]]] if isinstance(phase, dict) and match[1] in phase else []
    return found


def _same(asked: FlagValue, runs: Any) -> bool:
    """Whether a resolved argument is what was asked; what was left to SGLang differs only where a switch is on."""
    if asked is False:
        return runs is not True
    if asked in (None, "auto") or str(asked).startswith("builtin:"):
        return True
    if isinstance(runs, dict):
        return _holds(runs, _object(asked))
    if isinstance(asked, list) or isinstance(runs, list):
        sides = [side if isinstance(side, list) else [side] for side in (asked, runs)]
        return [str(each) for each in sides[0]] == [str(each) for each in sides[1]]
    try:
        return float(asked) == float(runs)
    except (TypeError, ValueError):
        return str(asked) == str(runs)


def _object(asked: FlagValue) -> Any:
    """A flag that is written as JSON; nothing where it is not, or names a file."""
    with suppress(ValueError, TypeError):
        return json.loads(str(asked))
    return {}


def _holds(runs: Any, asked: Any) -> bool:
    """Whether all that was asked is in an object that SGLang filled up."""
    if isinstance(runs, dict) and isinstance(asked, dict):
        return all(name in runs and _holds(runs[name], value) for name, value in asked.items())
    return bool(runs == asked)


def _algorithm(seen: Seen) -> Gate:
    asked = seen.config.speculative.ALGORITHM if seen.config.speculative else None
    runs = seen.info.get("speculative_algorithm")
    if runs == asked:
        return passed("algorithm")
    if asked is None:
        return failed("algorithm", f"plain decoding was asked for, {runs} runs")
    detail = "so the draft is not given the hidden states that it was trained on: leave --speculative-algorithm to us"
    return failed("algorithm", f"{asked} was asked for, {runs or 'plain decoding'} runs, {detail}")


def mistaken_draft(seen: Seen) -> Iterator[Gate]:
    """An EAGLE-3 draft under another algorithm, where nobody here asked for either."""
    runs, draft = seen.info.get("speculative_algorithm"), draft_folder(seen)
    if draft is not None and runs not in {None, "EAGLE3"} and any("Eagle3" in name for name in draft.architectures):
        yield failed("algorithm", f"an EAGLE-3 draft runs under {runs}: start it with --speculative-algorithm EAGLE3")
    elif draft is None and runs == "EAGLE":
        folder = seen.info.get("speculative_draft_model_path")
        yield warned(
            "algorithm",
            f"EAGLE runs, not EAGLE3, and the draft ({folder}) cannot be read here: an EAGLE-3 draft is then not given "
            "the hidden states that it was trained on, and accept_len is near 1: start one with "
            "--speculative-algorithm EAGLE3",
        )


def _draft_class(seen: Seen) -> Gate:
    """Each rank loads the target first and the draft last; the first rank speaks for all."""
    first_rank = [line for line in lines(seen.log) if not OTHER_RANK.search(line)]
    loaded = [match[1] for line in first_rank if (match := _LOADED.search(line))]
    if any("Eagle3" in name for name in loaded):
        return passed("draft_class")
    if len(loaded) <= 1:
        return unknown("draft_class", "the log does not name the class of the draft")
    detail = f"the draft was loaded as {loaded[-1]}, no EAGLE-3 class: see architectures in its config.json"
    return failed("draft_class", detail)


def captured_batches(seen: Seen) -> list[int]:
    """Batch sizes with a CUDA graph, by the log or else the arguments; none where graphs are off or nothing tells."""
    if found := _CAPTURED.findall(seen.log):
        return [int(size) for size in found[0].split(",")]
    config = seen.info.get("cuda_graph_config")
    decode = config.get("decode") or {} if isinstance(config, dict) else {}
    if seen.info.get("device") == "cpu" or seen.info.get("disable_cuda_graph") or decode.get("backend") == "disabled":
        return []
    sizes = decode.get("bs") or seen.info.get("cuda_graph_bs") or []
    largest = decode.get("max_bs") or seen.info.get("cuda_graph_max_bs")
    return [int(size) for size in sizes] or ([int(largest)] if largest else [])


def capacity(seen: Seen) -> Iterator[Gate]:
    """Is there room for as many streams as are measured?"""
    sizes, streams = captured_batches(seen), seen.streams
    if sizes and max(sizes) < streams:
        yield warned(
            "captured_batch",
            f"{streams} streams, graphs for at most {max(sizes)}: set cuda-graph-max-bs-decode (before SGLang 0.5.14 "
            f"cuda-graph-max-bs) to {streams}",
        )
    elif sizes:
        yield passed("captured_batch")
    yield _max_running_requests(seen)


def _max_running_requests(seen: Seen) -> Gate:
    """By the scheduler's own state, of one data-parallel rank; else by the argument.

    Replicas take the argument each; under ``--enable-dp-attention`` ranks divide it among themselves (0.5.20,
    ``derive_attention_widths`` in runtime_context.py, ``requested_per_worker`` in kv_cache_configurator.py).
    """
    ranks, argument = seen.number("dp_size") or 1, seen.number("max_running_requests")
    each = seen.number("effective_max_running_requests_per_dp")
    if each is None and argument is not None:
        each = argument // ranks if seen.info.get("enable_dp_attention") else argument
    if each is None:
        return unknown("max_running_requests", "the server does not say how many requests it runs at once")
    running = each * ranks
    if running >= seen.streams:
        return passed("max_running_requests")
    return warned(
        "max_running_requests",
        f"{seen.streams} streams, but {running} run at once and the others wait (SGLang's default with EAGLE3 is 48): "
        f"set max-running-requests to {seen.streams} for plain decoding and EAGLE3 alike",
    )
