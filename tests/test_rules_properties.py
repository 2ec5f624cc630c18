"""What holds for every launch and every space, over random ones."""

import itertools

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytune_eagle import rules, specfile
from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.space import Space

FLAGS = {
    "tp-size": [1, 2, 8],
    "page-size": [1, 16, 64, 48],
    "attention-backend": ["fa3", "fa4", "triton", "flashinfer", "flashmla", "trtllm_mha", "torch_native"],
    "prefill-attention-backend": ["fa3", "triton"],
    "decode-attention-backend": ["fa3", "triton", "flashmla"],
    "kv-cache-dtype": ["auto", "fp8_e5m2"],
    "chunked-prefill-size": [1000, 4096, -1],
    "enable-deterministic-inference": [True, False],
    "max-running-requests": [8, 48],
    "disable-cuda-graph": [True],
    "cuda-graph-max-bs-decode": [8],
    "sampling-backend": ["pytorch", "flashinfer"],
    "disable-custom-all-reduce": [True, False],
    "num-continuous-decode-steps": [4],
    "enable-nccl-nvls": [True],
    "schedule-policy": ["fcfs", "lpm"],
    "speculative-adaptive": [True],
    "speculative-use-rejection-sampling": [True],
    "pp-size": [1, 2],
}
ENV = {
    "NCCL_PROTO": ["LL", "ll", "Simple", "LL128", "^LL128", "LL,Simple"],
    "NCCL_ALGO": ["Ring", "ring", "ring,tree;allreduce:tree", "ring,tree", "allreduce:tree", "ring;allreduce:nvls"],
    "NCCL_NTHREADS": [100, 256, 512, 1024, 32],
    "NCCL_BUFFSIZE": [4194304, 16777216],
    "NCCL_MAX_NCHANNELS": [0, 4, 64],
    "NCCL_MIN_NCHANNELS": [0, 8, 100],
    "NCCL_NVLS_ENABLE": [0, 1],
    "NCCL_P2P_LEVEL": ["SYS", "PHB"],
    "NCCL_P2P_DISABLE": [1],
}


def some(names):
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in names.items()})


launches = st.builds(
    lambda triple, args, env: Config(
        model="/m",
        speculative=triple
        and Speculative(draft="/d", num_steps=triple[0], eagle_topk=triple[1], num_draft_tokens=triple[2]),
        tuned_args=args,
        env={name: str(value) for name, value in env.items()},
    ),
    st.none() | st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.integers(2, 70)),
    some(FLAGS),
    some(ENV),
)
facts = st.builds(
    rules.Assumptions,
    sglang=st.sampled_from([(0, 5, 8), (0, 5, 16), (0, 5, 20), (0, 5, 23)]),
    nccl=st.sampled_from([(), (2, 31, 0)]),
    gpus=st.sampled_from([0, 8]),
    mla=st.sampled_from([None, True, False]),
    arch=st.sampled_from([None, 80, 90, 100, 120]),
    amx=st.sampled_from([None, True, False]),
)


@settings(max_examples=150)
@given(launches, facts)
def test_a_canonical_form_is_its_own(config, known):
    """Nothing more is found in a canonical form, it has the key of its launch, and names no flag not asked for."""
    judgement = rules.judge(config, known)
    if judgement.canonical is None:
        assert any(finding.verdict == "invalid" for finding in judgement.findings)
        return
    again = rules.judge(judgement.canonical, known)
    assert again.findings == ()
    assert again.canonical == judgement.canonical
    assert rules.key(config, known) == rules.key(judgement.canonical, known) == rules.name(judgement.canonical)
    assert set(judgement.canonical.tuned_args) <= set(config.tuned_args)
    assert set(judgement.canonical.env) <= set(config.env)


@settings(max_examples=100)
@given(launches, facts)
def test_the_parts_are_apart(config, known):
    """Judging one part after the other is judging both, and the second changes no flag that the first reads."""
    whole = rules.judge(config, known)
    first = rules.judge(config, known, "speculative")
    if first.canonical is None:
        assert whole.canonical is None
        return
    second = rules.judge(first.canonical, known, "server")
    assert second.canonical == whole.canonical
    if second.canonical is not None:
        before, after = (
            {n: v for n, v in c.tuned_args.items() if n in rules.BESIDE_SPECULATION}
            for c in (first.canonical, second.canonical)
        )
        assert before == after
        assert second.canonical.speculative == first.canonical.speculative


def dimension(values):
    return st.lists(st.sampled_from([None, *values]), min_size=1, max_size=3, unique_by=lambda v: (type(v), v))


@st.composite
def spaces(draw):
    args = draw(st.lists(st.sampled_from(sorted(FLAGS)), max_size=3, unique=True))
    nccl = draw(st.lists(st.sampled_from(sorted(ENV)), max_size=3, unique=True))
    tree = {
        "name": "s",
        "engine": {"model": "/m", "draft": "/d", "args": {} if "tp-size" in args else {"tp-size": 2}},
        "node": {"gpus": draw(st.sampled_from([0, 8]))},
        "space": {
            "speculative": {"num_steps": [1, 3], "eagle_topk": [1, 2], "num_draft_tokens": [2, 4, 8]},
            "args": {name: draw(dimension(FLAGS[name])) for name in args},
            "nccl": {name: draw(dimension(ENV[name])) for name in nccl},
        },
    }
    return specfile.parse(yaml.safe_load(yaml.safe_dump(tree)))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(spaces())
def test_points_are_what_judging_every_combination_gives(spec):
    """`size` and `points` agree with judging each combination whole, whatever rules cross between its settings."""
    columns = {name: list(getattr(spec.space.speculative, name)) for name in rules.SPECULATIVE_NAMES}
    columns |= {name.replace("-", "_"): list(values) for name, values in spec.space.args.items()}
    columns |= {name.lower(): list(values) for name, values in spec.space.nccl.items()}
    try:
        space = Space(spec)
    except SpecError:
        return  # nothing valid at all
    columns |= {d.column: [None] for d in space.dimensions if d.dropped}
    wanted = set()
    for combination in itertools.product(*columns.values()):
        form = space.judge(space.config(dict(zip(columns, combination, strict=True)))).canonical
        if form is not None:
            wanted.add(rules.name(form))
    configs = [space.config(params) for params in space.points()]
    assert len(configs) == space.size == len(wanted)
    assert {space.key(config) for config in configs} == wanted
    assert all(space.judge(config).findings == () for config in configs if config.args == spec.engine.args)
    assert len({config.command() for config in configs}) == space.size
