"""What a server died of, told from its log and laid to the configuration, the machine or the spec.

Exit codes say little: a failed scheduler and an orderly end both give -9. What a fault leads to: a configuration's is a
failed trial that the search learns from; a machine's is a `NodeError`, and the trial is asked again elsewhere; the
spec's ends the study with the reason, since nothing in it can run.

Ranks die of one another. So a cause is the answer wherever in the log it stands; without one, the first of what may
have followed from it. Classes and their words are in `raytune_eagle.failures.classes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from signal import Signals

from raytune_eagle.failures.classes import CRASHES, KINDS, RULES, Fault, Rule, crashed
from raytune_eagle.logs import Stage, clean, lines, stage, stage_of_last, without_requests


@dataclass(frozen=True)
class Failure:
    """What a server died of.

    Attributes:
        name: the class, for example ``tree_too_small``.
        phase: how far it had come.
        detail: one line for people: what it said and, where known, what to do.
        fault: whose: of this configuration, of the machine, or of the whole spec.
        transient: worth one more try as it is.
        line: the words of the log that decided.
        at: where in the log they are, in characters.
    """

    name: str
    phase: Stage
    detail: str
    fault: Fault = "configuration"
    transient: bool = False
    line: str = ""
    at: int = 0


_MOST = 2_000_000
"""Characters of either end of a log that a failure is looked for in."""
_LONG_LINE = re.compile(r"^(.{20000}).+$", re.MULTILINE)
READY = "The server is fired up and ready to roll"
"""What went wrong before this (a warm-up's ``/freeze_gc`` that nobody heard, 0.5.20) did not keep it from serving."""
UNBOUND = "error while attempting to bind on address"
HIT = "hit an exception"
"""SGLang's word before the traceback that a scheduler or tokenizer dies of."""
EXCEPTION = re.compile(r"^(?:\[[^]]*\] )?(\w[\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)
AFTERWARDS = re.compile(r"Sleeping \d+ seconds before crash|(?:SIGQUIT|sigquit)\b.*child|kill_process_tree called")
"""What the launcher of 0.5 writes whatever a child died of."""


def _readable(text: str) -> str:
    """The log with its lines alone on them, and so long that reading it takes a second: start and end say all.

    What users asked and were answered is left out: it may be about any failure.
    """
    if len(text) > 2 * _MOST:
        text = f"{text[:_MOST]}\n{text[-_MOST:]}"
    return _LONG_LINE.sub(r"\1", without_requests(clean(text)))


def _found(rule: Rule, text: str) -> Failure | None:
    """The failure, if the text is of this class: a cause is told from its last words, anything else from the first."""
    searched = text.partition(READY)[0] if rule.start else text
    matches = list(re.finditer(rule.pattern, searched, re.MULTILINE))
    if not matches:
        return None
    match = matches[-1 if rule.kind == "cause" else 0]
    reached = stage_of_last(text[: match.end()])
    if rule.stages and reached not in rule.stages:
        return None
    begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    line = text[begin : end if end >= 0 else None].strip().splitlines()[-1].strip()
    detail = f"{rule.said}{rule.advice}: {line[:300]}"
    return Failure(rule.name, reached, detail, rule.fault, rule.transient, line, match.start())


def _all_found(text: str) -> list[Failure]:
    of = {kind: [found for rule in RULES if rule.kind == kind and (found := _found(rule, text))] for kind in KINDS}
    ends = of["end"]
    if ends:  # one event, seen from near or far
        ends[0] = replace(ends[0], at=min(end.at for end in ends))
    return [*of["cause"], *sorted(of["symptom"] + ends[:1], key=lambda failure: failure.at), *ends[1:]]


def matching(text: str) -> list[Failure]:
    """Every class that the text is of; the first is the answer, the others followed from it or patterns overlap."""
    return _all_found(_readable(text))


def classify(text: str, exit_code: int | None) -> Failure:
    """Tell from its log what a server died of.

    A process that was killed is the machine's fault; where the kernel did it for want of memory, `killed_for_memory`
    says so in its place. One that crashed (SIGSEGV, SIGABRT, …) was not killed.
    """
    text = _readable(text)
    found = _all_found(text)
    died = _died_before(found, text) if found else None
    if found and not died:
        return found[0]
    said = [died] if died else EXCEPTION.findall(text[text.rfind(READY) :] if READY in text else text)
    if not said and exit_code is not None and (ended := _signalled(exit_code, text)):
        return ended
    last = said[-1] if said else _last_line(text)
    how = "" if exit_code is None else f" with {exit_code}"
    detail = f"the server ended{how} during {stage(text)}: {last[:300]}"
    return Failure("unknown", stage(text), detail, line=last)


def _died_before(found: list[Failure], text: str) -> str | None:
    """The exception, of no class, that a rank had died of before others said what is known: that followed from it.

    Not so where one was killed: ranks that lose it die of many an exception before their launcher tells.
    """
    first = EXCEPTION.search(text, text.find(HIT)) if HIT in text else None
    sure = {rule.name for rule in RULES if rule.kind == "cause"} | {"killed_by_os"}
    told = first and found[0].name not in sure and first.end() < min(failure.at for failure in found)
    return first[1] if first and told else None


def _signalled(exit_code: int, text: str) -> Failure | None:
    """What the launcher's own end says where the log says nothing (a shell adds 128 to the signal)."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    rule = next((crashed(signal) for signal in CRASHES if signal == number), None)
    if number == Signals.SIGKILL:
        rule = next(rule for rule in RULES if rule.name == "killed_by_os")
    return Failure(rule.name, stage(text), f"{rule.said}{rule.advice}", rule.fault) if rule else None


def _last_line(text: str) -> str:
    said = [line for line in lines(text) if line.strip()]
    return next((line for line in reversed(said) if not AFTERWARDS.search(line)), said[-1] if said else "an empty log")


def killed_for_memory(killed: Failure) -> Failure:
    """What `killed_by_os` is where the kernel ended processes for want of memory meanwhile: the configuration's."""
    advice = (
        "the kernel killed a process of the server for want of memory: lower what it keeps there, or use more nodes"
    )
    return Failure("oom_host", killed.phase, f"{advice} (oom_kill in /proc/vmstat rose)")


def hangs(text: str) -> bool:
    """Whether the server said that it gave up although its processes live on, busy: a bind that failed (0.5.16)."""
    return UNBOUND in text
