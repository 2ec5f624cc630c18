"""What NCCL 2.27-2.31 makes of its environment, and what SGLang puts there itself.

Names of files are NCCL's (``src/graph/tuning.cc`` and others; ``src/tuning`` from 2.31) unless a version of SGLang is
named.
"""

from __future__ import annotations

from raytune_eagle.rules import all_reduce
from raytune_eagle.rules.base import Change, Launch, Verdict
from raytune_eagle.rules.nccl_lists import FUNCTIONS, named, unusable

P2P_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
"""Words of NCCL_P2P_LEVEL; whole numbers are the older form."""

_MOST_CHANNELS = 64
_MOST_THREADS, _LEAST_THREADS, _WARP = 512, 64, 32
_DEFAULT_BUFFER = 4194304

NUMBERS = (
    "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
)
"""Variables that are whole numbers."""

SIZES = ("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE")
"""Those that are bytes; unchecked by NCCL, which takes -1 as it is (init.cc computeBuffSizes)."""

READS = (*all_reduce.READS, "enable-nccl-nvls", "enable-symm-mem")
"""Flags that rules of this file and of `raytune_eagle.rules.server` read."""

NAMES = (
    *("NCCL_PROTO", "NCCL_ALGO", "NCCL_P2P_LEVEL", *NUMBERS, *SIZES),
    *("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE"),
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"),
)
"""Variables that are known here, and those that look like one of them; NCCL has many more."""

TUNING = (*NUMBERS, *SIZES, "NCCL_PROTO", "NCCL_ALGO", "NCCL_P2P_LEVEL")
"""Variables that only change how fast it is; others may be what makes it work at all."""


# ------------------------------------------------------------------------------------------------ rewritten, no effect
def one_gpu_has_no_nccl(launch: Launch) -> Change | None:
    """At tensor (and pipeline) parallel size 1 nothing is reduced, on a CPU not with NCCL (parallel_state.py)."""
    given = [name for name in launch.env if _is_knob(name)]
    why = all_reduce.has_no_nccl(launch)
    return Change("no effect", f"{', '.join(given)}: {why}", env=dict.fromkeys(given)) if given and why else None


def messages_bypass_nccl(launch: Launch) -> Change | None:
    """Where custom all-reduce or FlashInfer's fusion takes the steps' messages, how fast NCCL is decides nothing.

    See `raytune_eagle.rules.all_reduce`. Lists that NCCL would refuse stay, for it is set up all the same.
    """
    given = [name for name in launch.env if name in TUNING]
    if not given or nccl_finds_an_algorithm(launch) or p2p_level_is_known(launch):
        return None
    why = all_reduce.bypasses_nccl(launch)
    return Change("no effect", f"{', '.join(given)}: {why}", env=dict.fromkeys(given)) if why else None


def determinism_sets_the_algorithm(launch: Launch) -> Change | None:
    """--enable-deterministic-inference sets NCCL_ALGO=allreduce:tree, and from 0.5.20 both channel counts.

    SGLang attention_hook.py 0.5.20:589-611; server_args.py 0.5.16:6817. Beside more than one tensor parallel rank.
    """
    if not launch.deterministic or launch.number("tp-size", 1) <= 1:
        return None
    channels = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS") if launch.facts.sglang >= (0, 5, 20) else ()
    given = [name for name in ("NCCL_ALGO", *channels) if name in launch.env]
    if not given:
        return None
    reason = f"{', '.join(given)}: set by --enable-deterministic-inference"
    return Change("rewritten", reason, env=dict.fromkeys(given))


def buffsize_is_for_simple(launch: Launch) -> Change | None:
    """NCCL_BUFFSIZE sizes the buffers of the Simple protocol only (init.cc computeBuffSizes); 4 MiB is the default."""
    size = launch.env.get("NCCL_BUFFSIZE")
    if size is None:
        return None
    if not _may("simple", launch):
        reason = f"NCCL_BUFFSIZE: it sizes Simple only, not {launch.env['NCCL_PROTO']}"
    elif size.strip() == str(_DEFAULT_BUFFER):
        reason = f"NCCL_BUFFSIZE: {_DEFAULT_BUFFER} is the default"
    else:
        return None
    return Change("no effect", reason, env={"NCCL_BUFFSIZE": None})


def nthreads_is_not_for_ll128(launch: Launch) -> Change | None:
    """LL128 takes NCCL_LL128_NTHREADS instead; LL takes 512 by itself, 0 and less is unset (tuning.cc getNthreads)."""
    threads = whole(launch.env.get("NCCL_NTHREADS"))
    if threads is None:
        return None
    if not _may("simple", launch) and not _may("ll", launch):
        reason = "LL128 does not read it"
    elif threads <= 0:
        reason = f"{threads} leaves it to NCCL"
    elif not _may("simple", launch) and _threads(threads) == _MOST_THREADS:
        reason = f"{_MOST_THREADS} is the default of LL"
    else:
        return None
    return Change("no effect", f"NCCL_NTHREADS: {reason}", env={"NCCL_NTHREADS": None})


def nthreads_are_whole_warps(launch: Launch) -> Change | None:
    """No multiple of 32, and more than 512, become 512; fewer than 64 become 64 (tuning.cc getNthreads)."""
    threads = whole(launch.env.get("NCCL_NTHREADS"))
    if threads is None or threads <= 0 or _threads(threads) == threads:
        return None
    reason = f"NCCL_NTHREADS: {threads} becomes {_threads(threads)}"
    return Change("rewritten", reason, env={"NCCL_NTHREADS": str(_threads(threads))})


def channels_are_cut(launch: Launch) -> Change | None:
    """At most 64 channels, at least 1 (init.cc, connect.cc); 64 at most, or none at least, is what NCCL takes."""
    for name in ("NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS"):
        asked = whole(launch.env.get(name))
        if asked is None:
            continue
        most = "MAX" in name
        if (most and asked >= _MOST_CHANNELS) or (not most and asked <= 0):
            return Change("no effect", f"{name}: {asked} is as good as unset", env={name: None})
        real = max(asked, 1) if most else min(asked, _MOST_CHANNELS)
        if real != asked:
            return Change("rewritten", f"{name}: {asked} becomes {real}", env={name: str(real)})
    return None


def fewest_channels_win(launch: Launch) -> Change | None:
    """NCCL_MIN_NCHANNELS above NCCL_MAX_NCHANNELS: cut first, then doubled up to the minimum (connect.cc).

    For the CTAs of a communicator both become the maximum (init.cc).
    """
    low, high = whole(launch.env.get("NCCL_MIN_NCHANNELS")), whole(launch.env.get("NCCL_MAX_NCHANNELS"))
    if low is not None and high is not None and low > high:
        reason = f"NCCL_MAX_NCHANNELS: the minimum of {low} wins over {high}"
        return Change("rewritten", reason, env={"NCCL_MAX_NCHANNELS": str(low)})
    low, high = whole(launch.env.get("NCCL_MIN_CTAS")), whole(launch.env.get("NCCL_MAX_CTAS"))
    if low is not None and high is not None and low > high:
        reason = f"NCCL_MIN_CTAS: {low} becomes the maximum of {high}"
        return Change("rewritten", reason, env={"NCCL_MIN_CTAS": str(high)})
    return None


def p2p_level_needs_p2p(launch: Launch) -> Change | None:
    """NCCL_P2P_DISABLE=1 is asked before NCCL_P2P_LEVEL (paths.cc ncclGetLevel)."""
    if "NCCL_P2P_LEVEL" not in launch.env or launch.env.get("NCCL_P2P_DISABLE") != "1":
        return None
    return Change("no effect", "NCCL_P2P_LEVEL: NCCL_P2P_DISABLE is set", env={"NCCL_P2P_LEVEL": None})


def sglang_sets_these_itself(launch: Launch) -> Change | None:
    """NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE are 0 where not set, and follow flags of SGLang where those are given.

    ``_set_envs_and_config``, entrypoints/engine.py, 0.5.20:1677, 0.5.16:1260.
    """
    symm = bool(launch.flags.get("enable-symm-mem"))
    nvls = symm or bool(launch.flags.get("enable-nccl-nvls"))
    for name, forced in (("NCCL_NVLS_ENABLE", nvls), ("NCCL_CUMEM_ENABLE", symm)):
        value = launch.env.get(name)
        if value is not None and (forced or value == "0") and launch.number("nnodes", 1) == 1:
            verdict: Verdict = "rewritten" if forced and value != "1" else "no effect"
            return Change(verdict, f"{name}: SGLang itself makes it {int(forced)}", env={name: None})
    return None


# -------------------------------------------------------------------------------------------------------------- invalid
def nccl_finds_an_algorithm(launch: Launch) -> str | None:
    """``ncclInvalidUsage`` at start for a list that it cannot read, or at the first collective without an algorithm.

    From 2.24 there is no implicit Ring: Tree alone breaks Broadcast and AllGather; NVLS, NVLSTree, Collnet and PAT
    know Simple only; NVLSTree, Collnet and PAT need more than one node; NVLS needs NCCL_NVLS_ENABLE, which SGLang sets
    to 0. From 2.31 a function that NCCL_PROTO names and NCCL_ALGO does not has no algorithm (vllm PR 58179).
    """
    if all_reduce.has_no_nccl(launch):
        return None
    algo, proto = launch.env.get("NCCL_ALGO"), launch.env.get("NCCL_PROTO")
    if launch.deterministic and launch.number("tp-size", 1) > 1:
        algo = "allreduce:tree"
    if algo is None and proto is None:
        return None
    nvls = bool({"enable-nccl-nvls", "enable-symm-mem"} & set(launch.flags))
    nvls = nvls or launch.env.get("NCCL_NVLS_ENABLE", "0") != "0"
    return unusable(algo, proto, launch.facts.nccl_version, nvls=nvls, nodes=launch.number("nnodes", 1))


def p2p_level_is_known(launch: Launch) -> str | None:
    """An unknown word counts as LOC, with a warning only (paths.cc ncclGetLevel): surely not what was meant."""
    level = launch.env.get("NCCL_P2P_LEVEL")
    if level is None or level in P2P_LEVELS or level.isdigit() or all_reduce.has_no_nccl(launch):
        return None
    return f"NCCL_P2P_LEVEL={level}: not one of {', '.join(P2P_LEVELS)}"


def _is_knob(name: str) -> bool:
    return name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")


def _may(protocol: str, launch: Launch) -> bool:
    """Whether some function may use this protocol."""
    lists = named("NCCL_PROTO", launch.env.get("NCCL_PROTO"))
    return len(lists) < len(FUNCTIONS) or any(protocol in elements for elements in lists.values())


def whole(text: str | None) -> int | None:
    """A value as NCCL's strtoll reads it; None for what is no number."""
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def _threads(asked: int) -> int:
    if asked % _WARP or asked > _MOST_THREADS:
        return _MOST_THREADS
    return max(asked, _LEAST_THREADS)


REWRITES = (
    one_gpu_has_no_nccl,
    messages_bypass_nccl,
    determinism_sets_the_algorithm,
    sglang_sets_these_itself,
    nthreads_are_whole_warps,
    nthreads_is_not_for_ll128,
    buffsize_is_for_simple,
    channels_are_cut,
    fewest_channels_win,
    p2p_level_needs_p2p,
)
REFUSALS = (nccl_finds_an_algorithm, p2p_level_is_known)
