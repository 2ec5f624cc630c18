"""NCCL's settings are searched where they act, and nowhere else."""

import optuna
import pytest
import yaml
from small_space import CUSTOM, SMALL, space

from raytune_eagle import rules, specfile
from raytune_eagle.errors import SpecError
from raytune_eagle.space import Space

FUSING = {"sglang": (0, 5, 20), "arch": 90, "architecture": "KimiK25ForConditionalGeneration"}


@pytest.mark.parametrize(
    ("text", "facts", "advice"),
    [
        (CUSTOM, {"custom_all_reduce": True}, "write disable-custom-all-reduce: true to search it"),
        (SMALL, FUSING, "write enforce-disable-flashinfer-allreduce-fusion: true to search it"),
        (
            CUSTOM,
            {**FUSING, "custom_all_reduce": True},
            "write enforce-disable-flashinfer-allreduce-fusion: true and disable-custom-all-reduce: true to search it",
        ),
        (SMALL.replace("tp-size: 8", "tp-size: 1"), {}, "search it where tp-size is 2 or more"),
        (
            SMALL.replace("tp-size: 8", "tp-size: 8, enable-torch-symm-mem: true"),
            {"arch": 90},
            "symmetric memory takes messages of less than 64 MiB, so they do not reach NCCL: write enable-torch",
        ),
        (
            SMALL.replace("tp-size: 8", "tp-size: 8, enable-mscclpp: true"),
            {},
            "write enable-mscclpp: false to search it",
        ),
        (
            SMALL.replace("tp-size: 8", "tp-size: 4, enable-mscclpp: true"),
            {"sglang": (0, 5, 23)},
            "MSCCL++ takes messages up to 1 MiB",
        ),
    ],
    ids=["custom", "fusion", "both", "tp1", "symmetric_memory", "mscclpp", "mscclpp_of_4"],
)
def test_nccl_is_not_searched_where_it_cannot_act(text, facts, advice):
    """With custom all-reduce, fusion or one GPU no NCCL setting is made; its column stays, and a line says why."""
    s = Space(specfile.parse(yaml.safe_load(text)), rules.Assumptions(**facts))
    assert advice in s.without_nccl
    assert [line for line in s.notes() if advice in line]
    assert {p["nccl_proto"] for p in s.points()} == {p["nccl_buffsize"] for p in s.points()} == {None}
    assert {d.column: d.kind for d in s.dimensions}["nccl_buffsize"] == "int"
    assert all("NCCL" not in s.config(p).command() for p in s.points())
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert s.suggest(study.ask())["nccl_proto"] is None


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (CUSTOM, {"custom_all_reduce": False}),
        (CUSTOM, {}),
        (SMALL.replace("args: {tp-size: 8}", "args: {tp-size: 8, enforce-disable-flashinfer-allreduce-fusion: true}"),
         FUSING),
        (SMALL, {**FUSING, "arch": 120}),
        (SMALL, {**FUSING, "sglang": (0, 5, 8)}),
        (SMALL, {**FUSING, "sglang": (0, 5, 12), "h20": True}),
        (SMALL.replace("tp-size: 8", "tp-size: 8, enable-torch-symm-mem: true"), {"arch": 120}),
        (SMALL.replace("tp-size: 8", "tp-size: 8, enable-torch-symm-mem: true, dtype: float16"), {"arch": 90}),
        (SMALL.replace("tp-size: 8", "tp-size: 4, enable-mscclpp: true"), {"sglang": (0, 5, 20)}),
        (CUSTOM.replace("args: {tp-size: 8}", "args: {tp-size: 8, nnodes: 2}"), {"custom_all_reduce": True}),
    ],
    ids=["no_nvlink", "unknown_links", "fusion_off", "other_gpu", "before_fusion", "h20",
         "symmetric_memory_elsewhere", "symmetric_memory_float16",
         "mscclpp_of_4", "two_machines"],
)  # fmt: skip
def test_nccl_is_searched_where_it_acts(text, facts):
    """Without NVLink, with fusion off or unknown here, NCCL settings are searched."""
    s = Space(specfile.parse(yaml.safe_load(text)), rules.Assumptions(**facts))
    assert s.without_nccl is None
    assert {p["nccl_proto"] for p in s.points()} == {"Simple", "LL"}


def test_nothing_but_nccl_to_search_and_nothing_of_it_acts():
    """A space of NCCL settings alone that cannot act is a mistake, not a study of one point."""
    text = "name: s\nengine: {model: /m}\nspace: {nccl: {NCCL_PROTO: [null, LL]}}\n"
    with pytest.raises(SpecError, match=r"space.nccl: --tp-size 1 reduces nothing.*nothing else is searched"):
        space(text)


def test_a_start_with_nccl_settings_that_cannot_act_is_a_point_of_the_space():
    """The launch keeps them word for word; its point is the one without, of which the sampler learns."""
    s = space(CUSTOM + "start_from: [{num_steps: 1, eagle_topk: 2, num_draft_tokens: 3, NCCL_PROTO: LL}]")
    start = s.starts[0].config
    assert start.env == {"NCCL_PROTO": "LL"}
    told = s.told(start)
    assert told is not None
    assert told[0]["nccl_proto"] is None
    assert s.key(start) == s.key(start.model_copy(update={"env": {}}))
