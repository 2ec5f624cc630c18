"""What is wrong with a command line, in one line: where, and what to write instead."""

from __future__ import annotations

import difflib
import math
from typing import Any

import click

from raytune_eagle.cli.studies import say
from raytune_eagle.spec.flag_numbers import Limits

BAD_INPUT = 2
"""Exit code of bad usage and bad input."""


class _Text(click.types.StringParamType):
    """A text that is there: an unset variable in a script must not read as something else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = super().convert(value, param, ctx)
        if not text.strip():
            self.fail("is empty; write a value", param, ctx)
        return text


def refuse_empty(command: click.Command) -> None:
    """Let no option or argument of a command, or of those below it, be an empty text, but for those with own checks."""
    for param in command.params:
        if param.type is click.STRING and param.callback is None:
            param.type = _Text()
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        refuse_empty(each)


def refuse(exc: click.UsageError, context: click.Context | None = None) -> click.exceptions.Exit:
    """Tell it; raise what this returns. A command without arguments shows its help, as click has it."""
    if type(exc).__name__ == "NoArgsIsHelpError":  # only newer clicks have one
        raise exc
    words = exc.ctx.command_path.split()[1:] if exc.ctx else [(context and context.invoked_subcommand) or ""]
    line = line_of(exc)
    say([" ".join(words) + line if line.startswith(":") else " ".join([*words, line]).strip()])
    return click.exceptions.Exit(BAD_INPUT)


def line_of(exc: click.UsageError) -> str:
    """What is to stand behind the name of the command: an argument with its mistake, or a colon and the mistake."""
    command, context = exc.ctx.command if exc.ctx else None, exc.ctx
    if isinstance(exc, click.NoSuchOption):
        return f"{exc.option_name}: no such option{_instead(exc.option_name, _options(context))}"
    if isinstance(exc, click.BadOptionUsage):
        return f"{exc.option_name}: {'needs a value' if 'requires' in exc.message else 'takes no value'}"
    if isinstance(exc, click.MissingParameter) and exc.param:
        return f"{_name(exc.param)}: missing{_usage(context)}"
    if isinstance(exc, click.BadParameter) and exc.param:
        return f"{_name(exc.param)} {_wrong_value(exc, exc.param.type)}"
    if isinstance(command, click.Group) and context:
        asked = exc.message.split("'")[1] if "'" in exc.message else exc.message
        return f"{asked}: no such command{_instead(asked, command.list_commands(context))}"
    return f": {exc.message[:1].lower()}{exc.message[1:].rstrip('.')}{_usage(context)}"


def _name(param: click.Parameter) -> str:
    return max(param.opts, key=len) if isinstance(param, click.Option) else param.metavar or param.human_readable_name


def _usage(context: click.Context | None) -> str:
    if context is None:
        return ""
    return f"; write {context.command_path} {' '.join(context.command.collect_usage_pieces(context))}"


def _options(context: click.Context | None) -> list[str]:
    params = context.command.get_params(context) if context else []
    return [_name(param) for param in params if isinstance(param, click.Option)]


def _instead(written: str, known: list[str]) -> str:
    near = difflib.get_close_matches(written, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _wrong_value(exc: click.BadParameter, kind: Any) -> str:
    """Click's own words for what it says well, ours where it gives formulas."""
    written = exc.message.split("'")[1] if "'" in exc.message else exc.message.split()[0]
    if isinstance(kind, click.Choice):
        near = difflib.get_close_matches(written, kind.choices, 1)
        return f"{written}: write one of {', '.join(kind.choices)}" + (f"; did you mean {near[0]}?" if near else "")
    if not isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return exc.message.rstrip(".")
    number = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
    if isinstance(kind, click.IntRange | click.FloatRange):
        low, high = -math.inf if kind.min is None else kind.min, math.inf if kind.max is None else kind.max
        number += f", {Limits(low, high, kind.min_open, kind.max_open)}"
    return f"{written}: write {number}"
