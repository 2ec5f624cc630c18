"""Over every valid point of a shipped spec: no two are one launch.

The 924,480 points of the Kimi spec are s × n: speculative settings s with NCCL settings n, either of which goes with
either value of disable-custom-all-reduce. SGLang's own resolution of s and that switch is asked for all of them, and
NCCL's reading of n is computed here from its documentation. Two points that differ in s or the switch differ in their
resolved arguments; two that do not differ in n, and so in what NCCL reads.
"""

import itertools
from collections import defaultdict
from pathlib import Path

import pytest
import wide_space
from sglang_answers import ask

from raytune_eagle import specfile
from raytune_eagle.space import Space

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parent.parent
PAIR = ROOT / "raytune_eagle/builtin/tiny"
SPECS = ROOT / "search_spaces"
PROTOCOLS, FUNCTIONS = ("ll", "ll128", "simple"), ("broadcast", "allgather", "allreduce")


def resolutions(configs, platform):
    """SGLang's hash over all resolved arguments of each launch, with the bundled pair in the place of any model."""
    argv = [[_stand_in(word, before) for before, word in itertools.pairwise(["", *c.argv()])] for c in configs]
    answers = ask({"argv": words, "env": {}, "platform": wide_space.PLATFORMS[platform]} for words in argv)
    assert [answer for answer in answers if "refused" in answer] == []
    return [answer["hash"] for answer in answers]


def _stand_in(word, before):
    path = {"--model-path": PAIR / "target", "--speculative-draft-model-path": PAIR / "draft"}.get(before)
    return str(path or word)


def test_no_two_points_of_the_tiny_spec_are_one_launch():
    """Each of its points resolves to arguments of its own."""
    space = Space(specfile.load(SPECS / "tiny_cpu.yaml"))
    configs = [space.config(params) for params in space.points()]
    assert len(set(resolutions(configs, "cpu"))) == len(configs) == space.size == 153


def parts(space):
    """Every s of the Kimi spec, and every n by the switch; together they give each point once."""
    speculative, nccl = {}, defaultdict(dict)
    for params in space.points():
        s = tuple(params[name] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
        n = tuple((name, value) for name, value in params.items() if name.startswith("nccl_"))
        speculative.setdefault(s, params)
        nccl[params["disable_custom_all_reduce"]].setdefault(n, params)
    return speculative, nccl


@pytest.mark.timeout(900)
def test_no_two_points_of_the_kimi_spec_are_one_launch():
    """All 924,480 differ in SGLang's resolved arguments or in what NCCL reads.

    The switch is itself a resolved argument, and changes no other: asked of every tenth s.
    """
    space = Space(specfile.load(SPECS / "kimi_k25_8gpu.yaml"))
    speculative, nccl = parts(space)
    assert space.size == len(speculative) * sum(map(len, nccl.values())) == 924_480
    off = [params | {"disable_custom_all_reduce": True} for params in speculative.values()]
    on = [params | {"disable_custom_all_reduce": False} for params in off[::10]]
    hashes = resolutions([space.config(params) for params in off + on], "hopper")
    assert len(set(hashes)) == len(off) + len(on) == 1080 + 108
    for value, settings in nccl.items():
        read = {effective(space.config(params).env) for params in settings.values()}
        assert len(read) == len(settings), f"disable-custom-all-reduce: {value}"


def effective(env):
    """What NCCL 2.24-2.31 takes from its environment on one machine without NVLS (docs/userguide/source/env.rst).

    The algorithms and protocols that each function may use; threads and buffers where some of these read them;
    channels; the distance for peer-to-peer.
    """
    assert env.keys() <= {
        *("NCCL_PROTO", "NCCL_ALGO", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_P2P_LEVEL"),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    }
    protocols = listed(env.get("NCCL_PROTO"), PROTOCOLS)
    algorithms = listed(env.get("NCCL_ALGO"), ("ring", "tree"))
    able = {"allreduce": {"ring", "tree"}}
    runs = tuple(
        (name, tuple(sorted(algorithms[name] & able.get(name, {"ring"}))), tuple(sorted(protocols[name])))
        for name in FUNCTIONS
    )
    used = {protocol for _, _, some in runs for protocol in some}
    threads = int(env.get("NCCL_NTHREADS", 0)) or None
    if used == {"ll"}:
        threads = threads or 512
    return (
        runs,
        threads if used & {"ll", "simple"} else None,
        int(env.get("NCCL_BUFFSIZE", 4 << 20)) if "simple" in used else None,
        min(int(env.get("NCCL_MAX_NCHANNELS", 64)), 64),
        env.get("NCCL_P2P_LEVEL"),
    )


def listed(text, everything):
    """Elements by function of ``a,b;function:c``."""
    found = {function: set(everything) for function in FUNCTIONS}
    for entry in filter(None, (text or "").lower().split(";")):
        function, _, elements = entry.rpartition(":")
        found |= {name: set(elements.split(",")) for name in ([function] if function else FUNCTIONS)}
    return found
