"""`--warm-start`: what holds of an earlier study is taken, what does not is left out, and nothing at all is refused."""

import pytest
import yaml
from click.testing import CliRunner

from raytune_eagle import specfile, warm_start
from raytune_eagle.cli import main
from raytune_eagle.errors import SpecError
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.cost_model import Shape
from raytune_eagle.nodes.presets import KIMI_K25
from raytune_eagle.simulation import fleet
from raytune_eagle.space import Space
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study
from raytune_eagle.workload import load_prompts

pytestmark = pytest.mark.slow  # what they ask is a study of seconds

SPEC = {
    "name": "before",
    "engine": {"model": "/m", "draft": "/d/golden", "args": {"tp-size": 8, "disable-custom-all-reduce": True}},
    "workload": {"prompts": "builtin:tiny"},
    "space": {
        "speculative": {"num_steps": {"int": [1, 8]}, "eagle_topk": [1, 2], "num_draft_tokens": {"int": [2, 16]}},
        "nccl": {"NCCL_PROTO": [None, "Simple", "LL"], "NCCL_ALGO": [None, "Ring"]},
    },
    "search": {"sampler": "two-factor"},
    "confirm": {"top": 0},
    "budget": {"trials": 16, "hours": 1000},
}
HARDWARE = {"simulated: kimi-k25"}


def made(**changes):
    """Space and workload of the same spec with other values at some paths (`engine__model`)."""
    tree = yaml.safe_load(yaml.safe_dump(SPEC)) | {"name": "after"}
    for path, value in changes.items():
        *parts, last = path.split("__")
        inner = tree
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    spec = specfile.parse(tree)
    settings = spec.workload.settings()
    return Space(spec), Workload(prompts=load_prompts(spec.workload.prompts), **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    space, workload = made(name="before")
    store = ParquetStore(str(results))
    store.declare("before", {d.column: d.kind for d in space.dimensions})
    Study(space, workload, store).run(fleet(space.spec, "simulated:kimi-k25", 1))
    return results


def source(folder):
    return warm_start.Source.read(f"{folder}/study=before")


def test_both_factors_of_the_same(folder):
    """The same draft, workload and hardware: every launch brings both factors."""
    found = source(folder).launches(*made(), HARDWARE)
    assert len(found) == 16
    assert all(one.earlier and one.accept is not None and one.cycle is not None for one in found)


@pytest.mark.parametrize(
    "change",
    [
        {"workload__max_new_tokens": 64},
        {"workload__prompts": "builtin:mixed"},
        {"workload__temperature": 0.7},
        {"engine__draft": "/d/other"},
    ],
)
def test_what_drafts_accept_is_left_out(folder, change):
    """Another draft, other prompts or other sampling: no accept_len of it holds, its cycle times do."""
    found = source(folder).launches(*made(**change), HARDWARE)
    assert all(one.accept is None and one.cycle is not None for one in found)


def test_cycle_times_of_other_machines_are_left_out(folder):
    """On other hardware accept_len holds still; so it does under other server settings that change no token."""
    for space, hardware in (
        (made(), {"8x NVIDIA H200"}),
        (made(engine__args={"tp-size": 4, "disable-custom-all-reduce": True}), HARDWARE),
    ):
        found = source(folder).launches(*space, hardware)
        assert all(one.accept is not None and one.cycle is None for one in found)


def test_nothing_in_common_is_refused(folder):
    """Another model, or a flag that changes both: refused with reasons; so is a path without a study."""
    with pytest.raises(SpecError, match=r"accept_len: another dtype; cycle times: another dtype"):
        warm_start.read(
            [f"{folder}/study=before"],
            *made(engine__args={"tp-size": 8, "disable-custom-all-reduce": True, "dtype": "float16"}),
        )
    with pytest.raises(SpecError, match=r"accept_len: another model \(/m\); cycle times: another model \(/m\)"):
        warm_start.read([f"{folder}/study=before"], *made(engine__model="/other"))
    with pytest.raises(SpecError, match="no study there: give its folder"):
        warm_start.read([f"{folder}/study=gone"], *made())


def test_it_helps(folder):
    """The same draft on the same hardware: the best of the first two launches is faster than without."""
    space, workload = made(budget__trials=2, search__seed=3)
    best = {}
    for warm in (False, True):
        store = ParquetStore(str(folder / f"warm-{warm}"))
        store.declare("after", {d.column: d.kind for d in space.dimensions})
        study = Study(space, workload, store)
        if warm:
            study.search.learn_from(source(folder).launches(space, workload, HARDWARE))
        study.run(fleet(space.spec, "simulated:kimi-k25", 1))
        best[warm] = max(r.outcome.measurements[0].output_throughput for r in study.trials)
    assert best[True] > best[False]


def test_what_it_takes_is_right(folder):
    """Accept_lens taken are those of the draft, so a study without any launch knows its chains to within 2 %."""
    space, workload = made()
    store = ParquetStore(str(folder / "fresh"))
    study = Study(space, workload, store)
    study.search.learn_from(source(folder).launches(space, workload, HARDWARE))
    belief = study.search.belief()
    points = [{**next(space.points()), "num_steps": s, "eagle_topk": 1, "num_draft_tokens": s + 1} for s in range(1, 7)]
    first, rest = belief.halves(points, points)
    mean, _ = belief.accept.at(first[0], rest[0])
    for steps, value in enumerate(mean, 1):
        truth = KIMI_K25.drafts["golden"].accept_len(Shape(steps, 1, steps + 1))
        assert pytest.approx(truth, rel=0.02) == 2.718281828459045**value


def test_command(folder, tmp_path):
    """`run --warm-start` through the command, and only with the sampler that can learn from it."""
    path = tmp_path / "spec.yaml"
    words = ["run", str(path), "--cluster", "simulated:kimi-k25", "--results", str(tmp_path / "r"), "--trials", "3"]
    words += ["--warm-start", f"{folder}/study=before"]
    path.write_text(yaml.safe_dump(SPEC))
    assert CliRunner().invoke(main, words).exit_code == 0
    path.write_text(yaml.safe_dump(SPEC | {"search": {"sampler": "tpe"}, "name": "other"}))
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "only search.sampler two-factor learns from earlier studies" in refused.stderr
    foreign = {"name": "other", "engine": {"model": "/n", "draft": "/e", "args": {"tp-size": 8}}}
    path.write_text(yaml.safe_dump(SPEC | foreign))
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "nothing of it holds here" in refused.stderr
    assert [each.name for each in (tmp_path / "r").iterdir()] == ["study=before"], "what is refused leaves nothing"
