"""``attnserve serve``."""

from __future__ import annotations

import typer

from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import log_level
from service.settings import Settings

__all__ = ["app"]

app = typer.Typer()


@add_command(
    app,
    left_out=("json_",),
    epilog="Example: attnserve serve model-optimized --port 8000",
    rich_help_panel=opt.DEPLOY,
)
def serve(settings: Settings, show: opt.Show = opt.SHOW) -> None:
    """Serve models over HTTP.

    Environment variables set options that are not given (ATTNSERVE_PORT=9000),
    and more settings, which the documentation lists.
    """
    from service.launch import serve as run

    run(settings.logged_at(log_level(show)))
