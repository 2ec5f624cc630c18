"""Slips that read well and would cost launches: found by somebody who tried to break a spec."""

import pytest

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
