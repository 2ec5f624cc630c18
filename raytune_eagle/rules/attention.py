"""Which attention backend and page size SGLang ends up with, and what it refuses or rewrites on the way.

Lines are those of SGLang 0.5.20 (``srt/arg_groups/overrides.py`` unless another file is named).
"""

from __future__ import annotations

from dataclasses import dataclass

from raytune_eagle.rules.base import Change, Launch, Verdict

_DETERMINISTIC = ("ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton")
_DETERMINISTIC_WITH_RADIX = ("ascend", "fa3", "fa4", "triton")
_HOPPER, _BLACKWELL, _BLACKWELL_END = 90, 100, 120
_GRAPH_FLAGS = (
    "cuda-graph-bs",
    "cuda-graph-max-bs",
    "cuda-graph-bs-decode",
    "cuda-graph-max-bs-decode",
    "disable-cuda-graph-padding",
)

READS = (
    "attention-backend",
    "prefill-attention-backend",
    "decode-attention-backend",
    "speculative-draft-attention-backend",
    "page-size",
    "chunked-prefill-size",
    "device",
    "kv-cache-dtype",
    "enable-deterministic-inference",
    "sampling-backend",
    "disable-radix-cache",
    "disable-overlap-schedule",
    "disable-cuda-graph",
    "cuda-graph-backend-decode",
    "mem-fraction-static",
    *_GRAPH_FLAGS,
)
"""Flags that the rules of this file read beside the triple."""


@dataclass(frozen=True)
class Backends:
    """What ``attention_backends_of`` gives, and the base that some checks read instead; None is not known."""

    base: str | None
    prefill: str | None
    decode: str | None


def resolved(launch: Launch) -> Backends:
    """Equal prefill and decode backends replace the base (1158); the rest falls back to it.

    fa3 with an fp8_e5m2 cache becomes triton (1324).
    """
    prefill, decode = launch.text("prefill-attention-backend"), launch.text("decode-attention-backend")
    base = launch.text("attention-backend") or _default(launch)
    if prefill is not None and prefill == decode:
        base = prefill
    if base == "fa3" and launch.text("kv-cache-dtype") == "fp8_e5m2":
        base = "triton"
    if base == "intel_amx" and launch.on_cpu and launch.facts.amx is False:
        base = "torch_native"  # 1359
    return Backends(base, prefill or base, decode or base)


def draft_backend(launch: Launch) -> str | None:
    """What the draft decodes with (draft_utils.py:70)."""
    return launch.text("speculative-draft-attention-backend") or resolved(launch).decode


def page_size(launch: Launch) -> int:
    """The page size in effect: some backends know few sizes and set their own (1178-1240)."""
    forced = _forced_page(launch)
    return launch.number("page-size", 1) if forced is None else forced


def _default(launch: Launch) -> str | None:
    """``get_default_attn_backend``, model_override_base.py:294; on a CPU platform_hook.py:159."""
    if launch.on_cpu:
        return "intel_amx"
    arch, mla = launch.facts.arch, launch.facts.mla
    if arch is None:
        return None
    if launch.deterministic and arch < _BLACKWELL:  # 1123
        return "fa3"
    if mla is None:
        return None
    if launch.deterministic:
        return "triton" if mla else "flashinfer"
    return _default_mla(arch) if mla else _default_plain(launch, arch)


def _default_mla(arch: int) -> str:
    if arch == _HOPPER:
        return "fa3"
    return "flashinfer" if _BLACKWELL <= arch < _BLACKWELL_END else "triton"


def _default_plain(launch: Launch, arch: int) -> str:
    """Trees and pages keep both off their fastest kernels."""
    plain = launch.topk == 0 or (launch.topk == 1 and launch.number("page-size", 1) == 1)
    if plain and arch == _HOPPER:
        return "fa3"
    return "trtllm_mha" if plain and _BLACKWELL <= arch < _BLACKWELL_END else "flashinfer"


def _forced_page(launch: Launch) -> int | None:
    """What the backends make of the page size asked for; None when they leave it alone."""
    asked = launch.number("page-size", 1)
    flags = [launch.text(f"{part}attention-backend") for part in ("", "prefill-", "decode-")]
    backends = resolved(launch)
    used = {*flags, backends.base}
    decoding = {launch.text("attention-backend"), backends.base, launch.text("decode-attention-backend")}
    size = asked
    if "flashmla" in decoding:
        size = 64
    mla = {"trtllm_mla", "tokenspeed_mla"} & decoding or "cutedsl_mla" in used
    if mla and size not in {32, 64}:
        size = 64
    mha = "trtllm_mha" in {*used, launch.text("speculative-draft-attention-backend")}
    if mha and size not in {16, 32, 64, 128}:
        size = 64
    if "hpc_ops" in used:
        size = 64
    if "fa4" in used and launch.facts.arch == _BLACKWELL and launch.facts.mla is False and launch.topk <= 1:
        size = 128  # 1335
    return None if size == asked else size


# ------------------------------------------------------------------------------------------------ rewritten, no effect
def split_backends_replace_the_base(launch: Launch) -> Change | None:
    """Equal --prefill- and --decode-attention-backend replace --attention-backend (1158).

    Deterministic inference has looked at the base before.
    """
    prefill, base = launch.text("prefill-attention-backend"), launch.text("attention-backend")
    if base is None or prefill is None or prefill != launch.text("decode-attention-backend") or launch.deterministic:
        return None
    reason = f"--attention-backend: prefill and decode are {prefill} both, and replace it"
    return Change("no effect", reason, flags={"attention-backend": None})


def fa3_has_no_e5m2(launch: Launch) -> Change | None:
    """fa3 with --kv-cache-dtype fp8_e5m2 becomes triton, with only a warning (1324)."""
    if launch.text("attention-backend") != "fa3" or launch.text("kv-cache-dtype") != "fp8_e5m2":
        return None
    return Change("rewritten", "fa3 with an fp8_e5m2 cache becomes triton", flags={"attention-backend": "triton"})


def backend_sets_the_page_size(launch: Launch) -> Change | None:
    """Some backends know few page sizes and set their own (1178-1240); 1 is what SGLang takes (1397).

    A page size also moves the default backend (model_override_base.py:318), so it is left out only where that stays.
    """
    asked = launch.number("page-size", 0)
    if not asked:
        return None
    unset = launch.changed(Change("no effect", "", flags={"page-size": None}))
    pinned = launch.text("attention-backend") is not None or launch.facts.arch is not None or launch.on_cpu
    same = asked == 1 or (pinned and resolved(unset) == resolved(launch))
    forced = _forced_page(launch)
    if forced is not None:
        reason = f"--page-size {asked}: attention backend {resolved(launch).decode} makes it {forced}"
        left = None if same and page_size(unset) == forced else forced
        return Change("rewritten", reason, flags={"page-size": left})
    if not same or asked != page_size(unset):
        return None
    return Change("no effect", f"--page-size: {asked} is what is taken unset", flags={"page-size": None})


def backend_is_the_default(launch: Launch) -> Change | None:
    """A backend that SGLang takes by itself here (model_override_base.py:294); known only where the GPUs are."""
    asked = launch.text("attention-backend")
    if asked is None or (launch.on_cpu and launch.facts.amx is None):
        return None
    unset = launch.changed(Change("no effect", "", flags={"attention-backend": None}))
    same = resolved(unset) == resolved(launch) and page_size(unset) == page_size(launch)
    if not same or (launch.on_cpu and launch.deterministic):
        return None
    return Change(
        "no effect", f"--attention-backend: {asked} is what is taken unset", flags={"attention-backend": None}
    )


def sampling_backend_is_forced(launch: Launch) -> Change | None:
    """PyTorch on a CPU (platform_hook.py:170) and for deterministic inference (1077); flashinfer elsewhere (1066)."""
    asked = launch.text("sampling-backend")
    if asked is None:
        return None
    if launch.on_cpu or launch.deterministic:
        verdict: Verdict = "no effect" if asked == "pytorch" else "rewritten"
        return Change(verdict, "--sampling-backend: it is pytorch here", flags={"sampling-backend": None})
    if asked == "flashinfer" and launch.facts.arch is not None:
        return Change("no effect", "--sampling-backend: flashinfer is taken unset", flags={"sampling-backend": None})
    return None


def radix_cache_is_off(launch: Launch) -> Change | None:
    """Deterministic inference switches it off but for some backends (attention_hook.py:555)."""
    base = resolved(launch).base if not launch.text("attention-backend") else launch.text("attention-backend")
    off = launch.deterministic and base is not None and base not in _DETERMINISTIC_WITH_RADIX
    if not off or "disable-radix-cache" not in launch.flags:
        return None
    return Change("no effect", "--disable-radix-cache: it is off here", flags={"disable-radix-cache": None})


def overlap_is_off(launch: Launch) -> Change | None:
    """Off for speculation on a CPU (speculative_hook.py:28) and with pipeline parallelism (1670)."""
    cpu = launch.on_cpu and launch.speculative is not None
    if "disable-overlap-schedule" not in launch.flags or not (cpu or launch.number("pp-size", 1) > 1):
        return None
    return Change("no effect", "--disable-overlap-schedule: it is off here", flags={"disable-overlap-schedule": None})


def graphs_are_off(launch: Launch) -> Change | None:
    """No CUDA graphs with torch_native (attention_hook.py:52), or switched off: their flags do nothing.

    With torch_native they still count for the default of --mem-fraction-static (memory_hook.py:303).
    """
    off = "disable-cuda-graph" in launch.flags or launch.text("cuda-graph-backend-decode") == "disabled"
    native = resolved(launch).base == "torch_native" and "mem-fraction-static" in launch.flags
    both = ("disable-cuda-graph", "cuda-graph-backend-decode") if native else ()
    given = [name for name in (*both, *_GRAPH_FLAGS) if name in launch.flags]
    if not given or not (off or native):
        return None
    return Change("no effect", f"--{', --'.join(given)}: no CUDA graphs here", flags=dict.fromkeys(given))


# -------------------------------------------------------------------------------------------------------------- invalid
def deterministic_needs_a_backend_for_it(launch: Launch) -> str | None:
    """ValueError for any backend but these; on a CPU there is none (1147)."""
    if not launch.deterministic:
        return None
    backend = launch.text("attention-backend") or ("intel_amx" if launch.on_cpu else None)
    if backend is None or backend in _DETERMINISTIC:
        return None
    return f"--enable-deterministic-inference needs attention backend {', '.join(_DETERMINISTIC)}, not {backend}"


def chunks_are_whole_pages(launch: Launch) -> str | None:
    """chunked_prefill_size must be a multiple of page_size (validation_hook.py:134); unset it is a power of two."""
    size, chunk = page_size(launch), launch.number("chunked-prefill-size", 0)
    if size <= 1 or chunk < 0:
        return None
    if chunk and chunk % size:
        return f"--chunked-prefill-size {chunk} is no multiple of page size {size}"
    if not chunk and size & (size - 1):
        return f"--page-size {size}: the default --chunked-prefill-size is no multiple of it"
    return None


def cutedsl_only_decodes(launch: Launch) -> str | None:
    """An assertion: "CuteDSL MLA only supports decoding for now" (1296)."""
    if launch.text("prefill-attention-backend") != "cutedsl_mla":
        return None
    return "--prefill-attention-backend cutedsl_mla: it only decodes"


def gpus_have_the_backend(launch: Launch) -> str | None:
    """TRT-LLM and CuteDSL kernels are for some GPUs only (1246-1320, attention_hook.py:110)."""
    arch, backends = launch.facts.arch, resolved(launch)
    used = {backends.base, backends.prefill, backends.decode}
    if arch is None and not launch.on_cpu:
        return None
    blackwell = arch is not None and arch >= _BLACKWELL
    for name, able, where in (
        ("trtllm_mha", blackwell or arch == _HOPPER, "Hopper and Blackwell"),
        ("trtllm_mla", blackwell, "Blackwell"),
        ("tokenspeed_mla", blackwell, "Blackwell"),
        ("cutedsl_mla", blackwell and arch != _BLACKWELL_END, "Blackwell SM100"),
    ):
        if name in used and not able:
            return f"attention backend {name} is for {where} only"
    return None


REWRITES = (
    split_backends_replace_the_base,
    fa3_has_no_e5m2,
    backend_sets_the_page_size,
    backend_is_the_default,
    sampling_backend_is_forced,
    radix_cache_is_off,
    overlap_is_off,
    graphs_are_off,
)
REFUSALS = (deterministic_needs_a_backend_for_it, chunks_are_whole_pages, cutedsl_only_decodes, gpus_have_the_backend)
