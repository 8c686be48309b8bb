"""Real servers in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from socket import create_server

import psutil

import service


def serving(
    model: Path, prelude: str = "", **environment: str
) -> AbstractContextManager[tuple[str, subprocess.Popen[str]]]:
    """(address, process) of a real server on a free port, whose program starts with ``prelude``."""
    program = (
        f"{prelude}\n"
        "import sys\n"
        "from pathlib import Path\n"
        "from service.launch import serve\n"
        "from service.settings import Settings\n"
        "serve(Settings(model=Path(sys.argv[1]), port=0))"
    )
    return started(["-c", program, str(model)], **environment)


@contextmanager
def started(
    arguments: Sequence[str], **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(address, process) of a server that Python runs with these arguments."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=Path(service.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        ready = re.search(r"serving .+ at (http://127\.0\.0\.1:\d+)\n", line)
        assert ready, line + process.stderr.read()
        try:
            yield ready[1], process
        finally:
            process.kill()


PROGRAM = "import sys; from attnserve.cli.app import main; sys.exit(main(['serve', *sys.argv[1:]]))"


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def starting(
    model: Path, *arguments: str, **environment: str
) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """(address, process) of the command on a free port; it may not listen yet."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model), "--port", str(port), *arguments],
        cwd=Path(service.__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
