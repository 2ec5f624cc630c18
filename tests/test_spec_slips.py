"""Slips that read well and would cost launches: found by somebody who tried to break a spec."""

import copy

import pytest
import yaml

from raytune_eagle import specfile
from raytune_eagle.errors import SpecError

TEXT = """name: s
engine: {model: /m, draft: /d, version: 0.5.20, args: {tp-size: 8, disable-custom-all-reduce: true}, env: {A: b}}
node: {gpus: 8}
workload: {max_new_tokens: 64}
space:
  speculative: {num_steps: [1, 3], eagle_topk: [1], num_draft_tokens: [4]}
  nccl: {NCCL_PROTO: [null, LL]}
search: {seed: 0}
budget: {trials: 8, hours: 2}
"""


def written(tmp_path, text):
    """A spec file."""
    path = tmp_path / "s.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_text_that_the_slips_are_made_in_is_sound(tmp_path):
    """Each of the following is one slip away from it."""
    assert specfile.load(written(tmp_path, TEXT)).budget.hours == 2


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("seed: 0", "seed: -5", "search.seed: input should be greater than or equal to 0 (found -5)"),
        ("seed: 0", "seed: 1099511627776", "search.seed: input should be less than or equal to 4294967295 (found 10"),
        ("hours: 2", "hours: 1:30", "line 9, column 28: 1:30 would be read as 90: write a plain number, or quote"),
        ("hours: 2", "hours: 1:30.5", "line 9, column 28: 1:30.5 would be read as 90.5: write a plain number"),
        ("trials: 8", "trials: 010", "line 9, column 18: 010 would be read as 8: write a plain number, or quote a"),
        ("max_new_tokens: 64", "max_new_tokens: 100000000000000000000", "workload.max_new_tokens: input should be le"),
        ("tp-size: 8", "tp-size: 16", "engine.args.tp-size: 16 ranks need as many GPUs, node.gpus is 8"),
        ("tp-size: 8", "tp-size: 8, pp-size: 2", "engine.args.tp-size: 16 ranks need as many GPUs, node.gpus is 8"),
        ("tp-size: 8", "tp-size: 0", "engine.args.tp-size: 0: write 1 or more"),
        (
            "tp-size: 8",
            "tp-size: 8, tensor-parallel-size: 4",
            "engine.args.tensor-parallel-size: the same flag as engine.args.tp-size; keep one",
        ),
        ("NCCL_PROTO:", "NCCL_PROTOS:", "space.nccl.NCCL_PROTOS: NCCL reads no such variable; did you mean NCCL_PR"),
        ("NCCL_PROTO:", "NCCL_PROTOCOL:", "space.nccl.NCCL_PROTOCOL: NCCL reads no such variable; did you mean NC"),
        ("A: b", "nccl_proto: LL", "engine.env.nccl_proto: nobody reads that: write NCCL_PROTO"),
        ("A: b", 'A: "b\\0"', "engine.env.A: a NUL character, which no program can be given: leave it out"),
        ("tp-size: 8", 'tp-size: 8, served-model-name: "a\\0b"', "engine.args.served-model-name: a NUL character"),
        ("tp-size: 8", "tp-size: 8, served-model-name: --foo", "engine.args.served-model-name: '--foo' would be read"),
        ("version: 0.5.20", "version: abc", "engine.version: 'abc' is no version of SGLang: write it like 0.5.20"),
        ("tp-size: 8", "tp-size: 8, mem-fraction-static: .nan", "engine.args.mem-fraction-static: nan is no number th"),
        ("tp-size: 8", "tp-size: 8, mem-fraction-static: 1.5", "engine.args.mem-fraction-static: 1.5: write more tha"),
        ("tp-size: 8", "tp-size: 8, mem-fraction-static: 0", "engine.args.mem-fraction-static: 0: write more than 0 "),
        ("tp-size: 8", "tp-size: 8, swa-full-tokens-ratio: 2", "engine.args.swa-full-tokens-ratio: 2: write more t"),
        ("tp-size: 8", "tp-size: 8, grpc-port: 70000", "engine.args.grpc-port: 70000: write 1 to 65535"),
        ("tp-size: 8", "tp-size: 8, max-running-requests: -1", "engine.args.max-running-requests: -1: write 1 or m"),
        ("tp-size: 8", "tp-size: 8, context-length: 0", "engine.args.context-length: 0: write 1 or more"),
        ("tp-size: 8", "tp-size: 8, watchdog-timeout: soon", "engine.args.watchdog-timeout: 'soon' is no number"),
        ("tp-size: 8", "tp-size: 8, device: cpu", "engine.args.device: cpu, but node.gpus is 8: write gpus: 0,"),
        ("NCCL_PROTO:", "NCL_PROTO:", "space.nccl: 'NCL_PROTO': NCCL variables start with NCCL_; did you mean NCCL"),
        ("draft: /d", "drft: /d", "engine.drft: unknown key; did you mean 'draft'?"),
        ("num_steps: [1, 3]", "num_steps: 3", "space.speculative.num_steps: expected a list, found 3: write [3]"),
        (
            "num_steps: [1, 3]",
            "num_steps: {float: [1, 3]}",
            "space.speculative.num_steps.float: unknown key; known: i",
        ),
        ("model: /m", 'model: ""', "engine.model: empty: write a text"),
        ("name: s", f"name: {'s' * 300}", "name: 'sssss"),
        ("hours: 2", "hours: 1.0e+300", "budget.hours: input should be less than or equal to 87600 (found 1e+300)"),
        ("model: /m", "model: /m, start_timeout_s: 1.0e+300", "engine.start_timeout_s: input should be less than or e"),
        ("budget:", "---\nbudget:", "line 9, column 1: a second document begins here: a spec is one, so take out the"),
        ("[null, LL]", "[null, LL, .inf]", "space.nccl.NCCL_PROTO[2]: inf is no number that a server can be g"),
        ("[null, LL]", "[null, LL, no]", "space.nccl.NCCL_PROTO[2]: YAML reads off, no and false as False: write a n"),
    ],
)
def test_slips(tmp_path, old, new, line):
    """Each gives one line that begins so, and no other."""
    assert old in TEXT
    path = written(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(SpecError) as told:
        specfile.load(path)
    (only,) = told.value.problems
    assert only.removeprefix(f"{path}: ").startswith(line)
    assert len(only) < len(str(path)) + 200


@pytest.mark.parametrize(
    "name", ["NCCL_SYM_CTAS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_SOCKET_NTHREADS", "NCCL_P2P_NET_CHUNKSIZE"]
)
def test_other_variables_of_nccl_are_taken(tmp_path, name):
    """Variables that exist and look like those known here are no slips."""
    assert (
        name
        in specfile.load(written(tmp_path, TEXT.replace("NCCL_PROTO: [null, LL]", f"{name}: [null, 4]"))).space.nccl
    )


def test_two_machines_may_have_more_ranks_than_a_node_has_gpus(tmp_path):
    """Where a server spans machines its ranks are not counted against one."""
    text = TEXT.replace("tp-size: 8", "tp-size: 16, nnodes: 2")
    assert specfile.load(written(tmp_path, text)).engine.args["nnodes"] == 2


WHOLE = yaml.safe_load("""
name: s
engine: {model: /m, draft: [/d], python: p, version: 0.5.20, start_stall_s: 300, start_timeout_s: 1800,
         args: {tp-size: 8, mem-fraction-static: 0.8}, env: {A: b}}
node: {gpus: 8, cost_per_hour: 98.0, grace_s: 60}
workload: {prompts: builtin:mixed, max_new_tokens: 64, temperature: 0, ignore_eos: false, chat: false,
           concurrency: [1], precision: 0.02, min_passes: 2, max_passes: 8, request_timeout_s: 120,
           max_failed_share: 0.02}
objective: {metric: output_throughput, constraints: {itl_p95_ms: 40}}
space:
  speculative: {num_steps: {int: [1, 3]}, eagle_topk: [1, 2], num_draft_tokens: {int: [2, 4]}}
  nccl: {NCCL_BUFFSIZE: [null, 16777216]}
  args: {schedule-conservativeness: [0.5, 1.0]}
start_from: [{num_steps: 3, eagle_topk: 1, num_draft_tokens: 4, draft: /d, mem-fraction-static: 0.5}]
search: {sampler: two-factor, seed: 0, stop_below: 0.01, end_hopeless: true}
baseline: {every: 10}
confirm: {top: 3, rounds: 2}
budget: {trials: 60, hours: 12}
""")
FREE = {"A", "tp-size", "mem-fraction-static", "schedule-conservativeness"}
"""Keys that no spec knows: the node's own SGLang is asked for flags, and a variable may be called anything."""


def places(tree, path=()):
    """Path of every value in a spec."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def holder(tree, path):
    """What holds the value at the end of a path."""
    for key in path[:-1]:
        tree = tree[key]
    return tree


def told(tree):
    """The lines that a spec is refused with."""
    with pytest.raises(SpecError) as refused:
        specfile.parse(tree)
    return refused.value.problems


def misspelt(path):
    """The whole spec with one letter of the key at the end of `path` left out."""
    tree = copy.deepcopy(WHOLE)
    inner = holder(tree, path)
    entries = [(key[:2] + key[3:] if key == path[-1] else key, value) for key, value in inner.items()]
    inner.clear()
    inner.update(entries)
    return tree


@pytest.mark.parametrize(
    "path", [p for p in places(WHOLE) if isinstance(p[-1], str) and p[-1] not in FREE and len(p[-1]) > 3], ids=str
)
def test_a_letter_left_out_of_a_key_is_one_line(path):
    """Wherever it is: the line names what was meant, and nothing is missed that only goes by another name."""
    (line,) = told(misspelt(path))
    assert f"did you mean {path[-1]!r}?" in line or f"did you mean {path[-1]}?" in line


@pytest.mark.parametrize("path", [p for p in places(WHOLE) if type(holder(WHOLE, p)[p[-1]]) in (int, float)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "x", [1, 2], {"a": 1}, True], ids=str)
def test_a_number_that_is_none_is_one_line(path, value):
    """Wherever a number stands: one line with its place (that of its list, of a range), and no other."""
    tree = copy.deepcopy(WHOLE)
    holder(tree, path)[path[-1]] = value
    (line,) = told(tree)
    assert line.startswith(str(path[0]))


def test_a_gpu_is_no_device_of_a_node_without():
    """The CPU layer serves on the CPU; also where a launch of start_from says otherwise."""
    tree = copy.deepcopy(WHOLE) | {"node": {"gpus": 0}}
    tree["start_from"][0]["device"] = "cuda"
    assert told(tree) == ("start_from[0].device: cuda, but node.gpus is 0: write cpu, or how many GPUs a node has",)
