"""Rules of server flags that no speculative rule reads."""

from __future__ import annotations

from raytune_eagle.rules.base import Change, Launch, at_default

_DEFAULTS: dict[str, str] = {
    "dp-size": "1",
    "ep-size": "1",
    "nnodes": "1",
    "dtype": "auto",
    "load-format": "auto",
    "schedule-policy": "fcfs",
    "schedule-conservativeness": "1.0",
    "stream-interval": "1",
    "moe-runner-backend": "auto",
}
"""Defaults of SGLang's own parser, the same in 0.5.16 and 0.5.20: given or not, nothing can tell."""


def continuous_decode_steps_is_read_nowhere(launch: Launch) -> Change | None:
    """``--num-continuous-decode-steps`` is parsed and read nowhere (0.5.16-0.5.23)."""
    flag = "num-continuous-decode-steps"
    if flag not in launch.flags:
        return None
    return Change("no effect", f"--{flag}: SGLang parses it and reads it nowhere", flags={flag: None})


def one_rank_has_no_all_reduce(launch: Launch) -> Change | None:
    """--disable-custom-all-reduce at tensor parallel size 1, on a CPU, or where deterministic inference sets it.

    attention_hook.py 0.5.20:594; parallel_state.py builds no custom all-reduce for one rank.
    """
    flag = "disable-custom-all-reduce"
    if flag not in launch.flags:
        return None
    ranks = launch.number("tp-size", 1)
    if launch.on_cpu or ranks <= 1:
        return Change("no effect", f"--{flag}: there is one rank, or no GPU", flags={flag: None})
    if launch.deterministic:
        return Change("no effect", f"--{flag}: deterministic inference does that", flags={flag: None})
    return None


def default_is_default(launch: Launch) -> Change | None:
    """A flag at its parser's default (``add_cli_args``, 0.5.16 and 0.5.20)."""
    return at_default(launch, _DEFAULTS)


REWRITES = (continuous_decode_steps_is_read_nowhere, one_rank_has_no_all_reduce, default_is_default)
