"""``raytune-eagle bench``: measures a server that already runs."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING, Any

import click

from raytune_eagle.cli.options import Finite
from raytune_eagle.cli.studies import FAILED, if_interrupted, say, stdout
from raytune_eagle.errors import SpecError
from raytune_eagle.interrupts import INTERRUPTED
from raytune_eagle.model.workload import Workload
from raytune_eagle.workload import drawn, load_prompts, told_if_many

if TYPE_CHECKING:
    from raytune_eagle.bench import BenchReport

_OTHER_FILES = 64
"""Open files of a process that are no connections."""


@click.command()
@click.argument("url")
@click.option(
    "--workload", "prompts", default="builtin:mixed", show_default=True, help="Prompts: a file or builtin:NAME."
)
@click.option(
    "--num-prompts", type=click.IntRange(min=1), help="At most so many of them, drawn by --seed.  [default: all]"
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of their choice and order.")
@click.option("--concurrency", default="1", show_default=True, help="Simultaneous streams; several as 1,8.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per answer.")
@click.option("--temperature", type=Finite(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--max-passes", type=click.IntRange(min=1), default=8, show_default=True, help="Passes over the prompts.")
@click.option("--chat", is_flag=True, help="Send prompts as messages, in the model's chat template.")
@click.option("--model", metavar="NAME", help="Which of the server's models; default: the first that it lists.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the server's API key.")
@click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Form."
)
def bench(url: str, concurrency: str, form: str, **settings: Any) -> None:
    """Measure the server at URL: SGLang, vLLM, or any that speaks OpenAI's chat format."""
    from raytune_eagle import bench as running  # noqa: PLC0415 - half a second of imports
    from raytune_eagle.report.running import show_bench  # noqa: PLC0415

    key, model = _key(settings.pop("api_key_env")), settings.pop("model") or ""
    levels, passes = _levels(concurrency), min(2, settings["max_passes"])
    prompts = drawn(load_prompts(settings.pop("prompts")), settings.pop("num_prompts"), settings["seed"])
    workload = Workload(prompts=prompts, concurrency=levels, min_passes=passes, **settings)
    say(told_if_many(prompts, "--num-prompts N"))
    server = running.connect(url, key, model)
    if model and server.sglang and not workload.chat:
        raise SpecError(f"--model {model}: SGLang's own /generate has one model only; add --chat, or leave it out")
    with if_interrupted("nothing was measured to its end, and a bench begins anew"):
        report = running.bench(server, workload, lambda name, detail: click.echo(f"{name}: {detail}", err=True))
    if form == "json":
        click.echo(report.model_dump_json(indent=2))
    else:
        mark = f" ({report.why})" if report.why == running.STOPPED else ""
        title = f"{report.server} at {report.url}: {report.model}{mark}"
        show_bench(title, (report.measurements, report.categories), report.gates, stdout())
    if report.left_out:
        say([f"{report.why}; {_what_there_is(report)}"])
        sys.exit(INTERRUPTED if report.why == running.STOPPED else FAILED)
    if any(gate.verdict == "failed" for gate in report.gates):
        sys.exit(FAILED)


def _what_there_is(report: BenchReport) -> str:
    """Of a bench that did not come to its end."""
    cut = [m for m in report.measurements if m.concurrency in report.left_out]
    above = f"--concurrency {cut[0].concurrency} is above with its whole passes ({cut[0].passes})" if cut else ""
    left_out = ",".join(map(str, report.left_out[len(cut) :]))
    return (above or "what is above is whole") + (f", left out: --concurrency {left_out}" if left_out else "")


def _key(variable: str | None) -> str:
    if variable and variable not in os.environ:
        raise SpecError(f"--api-key-env {variable}: no such variable in the environment; export it first")
    return os.environ[variable] if variable else ""


def _levels(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    levels = tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
    if not all(levels) or len(set(levels)) < len(levels):
        raise SpecError(f"--concurrency {text}: write numbers above 0, each once, for example 1,8")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    if (highest := max(levels)) > most:
        raise SpecError(f"--concurrency {highest}: this shell lets a process have {most} connections (ulimit -n)")
    return levels
