"""`kvledger`: the table of commands. A command's module is imported only when it is called, so help is quick.

Exit codes: 0 done, 1 an error told in one line, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from kvledger.errors import KvledgerError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# name → (module, what help says). A module offers `app`, a Typer of one command or of several.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("kvledger.cli.serve", "Serve a model on this machine with an OpenAI-compatible API."),
    "run": ("kvledger.cli.run", "Answer one prompt in the terminal."),
    "chat": ("kvledger.cli.chat", "Talk with a model in the terminal."),
    "models": ("kvledger.cli.models", "List, fetch and remove models."),
    "plan": ("kvledger.cli.plan", "Will this model fit these devices, for how many requests, how fast, at what cost."),
    "ledger": ("kvledger.cli.ledger", "One of the six ledgers of KV memory, every figure explained."),
    "devices": ("kvledger.cli.devices", "List known devices, or measure this one."),
    "verify": ("kvledger.cli.verify", "Plan against fact: a start-up log, a metrics endpoint or case files."),
    "deploy": ("kvledger.cli.deploy", "The command line of an engine that realises a plan."),
    "bench": ("kvledger.cli.bench", "Measure the engine, the server and the lesson's claims."),
    "eval": ("kvledger.cli.evaluate", "Quality under compression: perplexity, KL divergence, retrieval."),
}


class LazyGroup(TyperGroup):
    """Commands by name; nothing of a command is imported before it is chosen."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command known by its help line alone: what the list of commands needs."""
        return _stub(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that is about to run: now its module is imported."""
        if args and args[0] in COMMANDS:
            return args[0], _load(args[0]), args[1:]
        return super().resolve_command(ctx, args)


def _stub(name: str) -> Any:
    stub = typer.Typer(add_completion=False)
    stub.command(name, help=COMMANDS[name][1])(lambda: None)
    return typer.main.get_command(stub)


def _load(name: str) -> Any:
    command = typer.main.get_command(importlib.import_module(COMMANDS[name][0]).app)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Know what every token of KV cache costs, then serve it at that price.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvledger import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and stop.", is_eager=True, callback=_print_version
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks of errors.", envvar="KVLEDGER_DEBUG"),
) -> None:
    """Options before the command."""


def main(args: list[str] | None = None) -> None:
    """Entry point of `kvledger`. Leaves through SystemExit with the code that the module's docstring tells."""
    argv = sys.argv[1:] if args is None else args
    _prepare_streams()
    sys.exit(_run(argv, debug="--debug" in argv or bool(os.environ.get("KVLEDGER_DEBUG"))))


def _prepare_streams() -> None:
    """Python has None for what a shell has closed; and a model may write what a terminal's encoding does not have."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the life of the process)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _run(argv: list[str], debug: bool) -> int:
    try:
        result = app(args=[a for a in argv if a != "--debug"], prog_name="kvledger", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except KvledgerError as error:
        if debug:
            raise
        sys.stderr.write(f"error: {error}\n")
        return 1
    except OSError as error:
        if debug or error.errno not in _DISK_FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written fails, too
        sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        return 1
    except Exception as error:
        return _usage(error)
    return result if isinstance(result, int) else 0


def _usage(error: Exception) -> int:
    """Wrong usage, told by typer; Ctrl-C at a prompt; anything else is a bug and keeps its traceback."""
    if hasattr(error, "show") and hasattr(error, "exit_code"):
        from typer import rich_utils

        rich_utils.rich_format_error(error)  # type: ignore[arg-type]
        return int(error.exit_code)
    if isinstance(error, typer.Abort):
        return 130
    raise error
