"""The Typer application: commands, error messages and exit codes.

Results go to stdout (a table, or one JSON object with --json); progress, warnings and errors go to
stderr. Exit codes: 0 success, 1 a check failed, 2 bad input or usage.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from errno import EDQUOT, ENOSPC
from typing import TYPE_CHECKING, Annotated

import typer
from typer.main import get_command

import attnserve
from attnserve.cli import INTERRUPTED, checks, compress, deploy, reports
from attnserve.cli.display import option_names, print_line, print_message, with_options
from attnserve.options import without_prefixes

if TYPE_CHECKING:
    from graph_passes.errors import AttnserveError

__all__ = ["app", "main"]

app = typer.Typer(
    name="attnserve",
    help="Find multi-head attention in ONNX models, compress it, verify and benchmark the result,"
    " and serve it over HTTP.",
    epilog="Example: attnserve optimize model.onnx --keep 0.99 --calib sentences.txt",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (compress, checks, reports, deploy):
    app.add_typer(group.app)


def _print_version(is_given: bool) -> None:
    if is_given:
        print_line(f"attnserve {attnserve.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and print an error in at most three lines; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(args=arguments, prog_name="attnserve", standalone_mode=False)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        return _failed(error, arguments)
    if result == 128 + signal.SIGINT:  # of typer, after Ctrl-C
        return _interrupted()
    return result if isinstance(result, int) else 0


def _failed(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error; returns the exit code."""
    from graph_passes.errors import AttnserveError

    if (usage := getattr(error, "format_message", None)) is not None:  # an error of Typer
        command = getattr(getattr(error, "ctx", None), "command_path", "attnserve")
        message = without_prefixes(usage())
        if message:
            _show(AttnserveError(message, f"see `{command} --help`"), arguments)
        return 2
    if type(error).__name__ == "Abort":
        return _interrupted()
    if isinstance(error, AttnserveError):
        _show(error, arguments)
    elif isinstance(error, OSError):  # for example a path that became unreadable
        prefix = f"{error.filename}: " if error.filename else ""
        fix = "free space" if error.errno in (ENOSPC, EDQUOT) else "check the path"
        _show(AttnserveError(f"{prefix}{error.strerror or error}", fix), arguments)
    else:
        _show(
            AttnserveError(
                f"unexpected {type(error).__name__}: {str(error)[:300]}",
                "add --verbose for the traceback, and please report it with the input",
            ),
            arguments,
        )
    if {"-v", "--verbose"} & set(arguments):
        traceback.print_exc(file=sys.stderr)
    return error.exit_code if isinstance(error, AttnserveError) else 2


def _show(error: AttnserveError, arguments: Sequence[str]) -> None:
    """Print an error and its fix, with the options of the command in ``arguments``."""
    command = get_command(app)
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument, command)
    text = f"error: {error.what}" + (f"\n  {error.fix}" if error.fix else "")
    print_message(with_options(text, option_names(command)))


def _interrupted() -> int:
    print_message(INTERRUPTED)
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
