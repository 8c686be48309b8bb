"""Run functions in a child process, to isolate crashes and memory.

The child is a new interpreter, not a fork, and it does not import the caller's ``__main__`` (as
multiprocessing would): scripts need no main guard, and the peak memory includes the call alone.
Requests are pickles from the parent. Answers are JSON, so that a child that loads untrusted files
cannot make the parent run code.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from graph_passes import errors
from graph_passes.errors import AttnserveError

__all__ = [
    "Worker",
    "WorkerCrashed",
    "allowed_environment",
    "describe_exit",
    "error_from_json",
    "error_to_json",
    "limit_process",
    "run_isolated",
    "search_path",
]

EXIT_S = 5.0
"""Time for a child to exit after it has closed its output."""

INSTALLATION = str(Path(__file__).absolute().parents[2])
"""The folder that contains this package."""

INHERITED = frozenset(
    {"HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"}
    | {"LD_PRELOAD", "GLIBC_TUNABLES", "TOKENIZERS_PARALLELISM"}
    | {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE"}
    | {"PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONFAULTHANDLER"}
    | {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONWARNINGS"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "ORT_DISABLE_TELEMETRY"}
    | {"ATTNSERVE_CACHE", "XDG_CACHE_HOME"}
    | {"SYSTEMROOT", "WINDIR", "USERPROFILE", "APPDATA", "LOCALAPPDATA"}
)
"""Environment variables that child processes inherit. NVIDIA's are listed one by one:
NVIDIA_API_KEY is a secret."""

INHERITED_PREFIXES = (
    "LC_",
    "CUDA_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "RAYON_",
    "MALLOC_",
)
"""Beginnings of the names of further variables that child processes inherit."""

SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables that child processes inherit without their empty and relative entries."""


class WorkerCrashed(AttnserveError):
    """A child process ended before it answered, or raised an error that is not an AttnserveError.

    Attributes:
        status: Its exit status, negative for a signal; None if it did not end.
    """

    default_code = "isolation.crashed"

    def __init__(
        self, what: str, fix: str = "", *, code: str = "", status: int | None = None
    ) -> None:
        super().__init__(what, fix, code=code)
        self.status = status

    @property
    def timed_out(self) -> bool:
        """Whether the child was killed because of its time limit."""
        return self.code == "isolation.timeout"


@dataclass(frozen=True)
class _Creation:
    """The first request: create the object of a worker."""

    prepare: Callable[[], object] | None
    factory: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _MethodCall:
    """A later request: call a method of the object."""

    method: str
    arguments: tuple[Any, ...]


class Worker:
    """A child process that creates one object and calls its methods.

    Arguments are pickled; results are JSON values (numbers, strings, lists, dicts, None). Use it as
    a context manager; it serves one call at a time. On Linux the child is killed when the thread
    that created it ends.

    Args:
        factory: An importable function or class that returns the object.
        arguments: Arguments of the factory.
        timeout_s: Time limit of creating the object; None for no limit.
        environment: Environment variables of the child, for example ``allowed_environment()``. None
            passes the environment of this process, with ``search_path()`` as PYTHONPATH.
        prepare: Called first in the child, for example ``limit_process``.
        on_start: Called with the process, before the object is created; another thread may kill it.
        silent: Whether to drop the stdout and stderr of the child, except for the end, which the
            error of a crash quotes. Otherwise both go to the stderr of this process.

    Raises:
        WorkerCrashed: The child ended, exceeded its time limit, or raised an unexpected error.
        AttnserveError: The factory raised it.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        *arguments: Any,
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
        on_start: Callable[[subprocess.Popen[bytes]], object] | None = None,
        silent: bool = False,
    ) -> None:
        try:
            self._start(environment, silent)
            if on_start is not None:
                on_start(self.process)
            self._request(_Creation(prepare, factory, arguments), timeout_s)
        except BaseException:
            if hasattr(self, "process"):  # else it could not be started
                self.close()
            raise

    def _start(self, environment: Mapping[str, str] | None, silent: bool) -> None:
        """Start the process, and a thread that reads its output."""
        if environment is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
        with _interrupts_blocked():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({os.getpid()})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if silent else None,
                env=environment,
            )
        self._output: deque[int] = deque(maxlen=300)  # the end, which the error of a crash quotes
        # The thread owns the pipe: a process that the child started may keep it open.
        pipe = self.process.stderr
        self.process.stderr = None
        self._reader = threading.Thread(target=self._read_output, args=(pipe,), daemon=True)
        self._reader.start()

    def _read_output(self, pipe: IO[bytes] | None) -> None:
        """Read the output of the child until it closes the pipe, and keep its end."""
        if pipe is None:
            return
        with pipe:
            while chunk := os.read(pipe.fileno(), 65536):
                self._output.extend(chunk)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the object in the child and return its result.

        Raises:
            WorkerCrashed: The child ended, exceeded ``timeout_s``, or raised an unexpected error.
            AttnserveError: The method raised it.
        """
        return self._request(_MethodCall(method, arguments), timeout_s)

    def _request(self, request: _Creation | _MethodCall, timeout_s: float | None) -> Any:
        """Send a request and return its result; see ``call`` for the errors."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timeout = threading.Event()

        def stop() -> None:
            timeout.set()
            self.process.kill()

        timer = None if timeout_s is None else threading.Timer(timeout_s, stop)
        if timer is not None:
            timer.start()
        try:
            with suppress(OSError):  # the child has ended: reading its answer finds out why
                pickle.dump(request, self.process.stdin)
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            if timer is not None:
                timer.cancel()
        answer = _json_object(line)
        if timeout.is_set() and not answer:
            raise WorkerCrashed(
                f"the child process did not finish within {timeout_s:g} s",
                "allow more time",
                code="isolation.timeout",
                status=self._exit_status(),
            )
        if not answer:
            status = self._exit_status()
            self._reader.join(EXIT_S)
            message = f"the child process ended with {describe_exit(status)}"
            if output := bytes(self._output).decode(errors="replace").strip():
                message += f": {output}"
            raise WorkerCrashed(message, status=status)
        if "error" in answer:
            raise error_from_json(answer["error"], WorkerCrashed)
        return answer["result"]

    def _exit_status(self) -> int:
        """Wait for the end of the child, and end it if it takes more than ``EXIT_S``."""
        try:
            return self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """End the child process."""
        self.process.kill()
        # Leaving the block closes the pipes, which fails for an unread request, and waits.
        with suppress(OSError), self.process:
            pass

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Call:
    """Worker object with the result of one function call."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.value = function(*arguments)

    def result(self) -> Any:
        """The result of the call."""
        return self.value


def _json_object(line: bytes) -> Mapping[str, Any]:
    """The JSON object on a line; empty if the line is none."""
    answer: Any = None
    with suppress(ValueError):
        answer = json.loads(line)
    return answer if isinstance(answer, dict) else {}


def run_isolated(
    function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None, **options: Any
) -> Any:
    """Call an importable function in a child process and return its JSON result.

    Args:
        options: ``environment``, ``prepare``, ``on_start`` and ``silent`` of ``Worker``.

    Raises:
        WorkerCrashed: The child ended, exceeded ``timeout_s``, or raised an unexpected error.
        AttnserveError: The function raised it.
    """
    with Worker(_Call, function, arguments, timeout_s=timeout_s, **options) as worker:
        return worker.call("result")


def limit_process(memory_bytes: int = 0, cpu_s: int = 0, nice: int = 0) -> None:
    """Limit the damage of an untrusted file to this process, for ``prepare`` of a ``Worker``.

    Ctrl-C ends it. If memory is short, the system ends it before any other process.

    Args:
        memory_bytes: Maximum memory that it allocates (its heap, stacks and writable private maps;
            files that are mapped for reading do not count); 0 for no limit.
        cpu_s: Maximum processor time in seconds; 0 for no limit.
        nice: Increment of the nice value (POSIX).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(os, "nice"):
        os.nice(nice)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for kind, limit in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CPU, cpu_s)):
            _, hard = resource.getrlimit(kind)
            if limit:
                maximum = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
                resource.setrlimit(kind, (maximum, maximum))


def search_path() -> list[str]:
    """The absolute entries of ``sys.path`` without the working folder, and this package's folder.

    The working folder may hold untrusted files, such as a ``random.py`` beside a downloaded model.
    """
    working = os.path.realpath(os.curdir)
    others = [p for p in sys.path if Path(p).is_absolute() and os.path.realpath(p) != working]
    return list(dict.fromkeys([INSTALLATION, *others]))


def allowed_environment(*prefixes: str) -> dict[str, str]:
    """The environment of a child process: an allow-list without secrets.

    The child imports the same ``attnserve`` as this process. Search paths keep only absolute
    folders that exist. An empty or relative entry means the working folder, which may hold a
    downloaded model: its ``random.py`` would be imported in place of the standard library's.

    Args:
        prefixes: Beginnings of further variable names to pass on.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED or name.startswith((*INHERITED_PREFIXES, *prefixes))
    }
    paths = {name: _absolute(os.environ.get(name, "")) for name in SEARCH_PATHS}
    paths["PYTHONPATH"] = [INSTALLATION, *paths["PYTHONPATH"]]
    return environment | {
        name: os.pathsep.join(folders) for name, folders in paths.items() if folders
    }


def _absolute(paths: str) -> list[str]:
    """The absolute entries of a search path that exist."""
    folders = paths.split(os.pathsep)
    return [path for path in folders if Path(path).is_absolute() and os.access(path, os.F_OK)]


def describe_exit(status: int) -> str:
    """Describe an exit status; negative values are signals."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def error_to_json(error: AttnserveError) -> dict[str, str]:
    """Serialize ``error`` as JSON for another process."""
    kind = type(error).__name__
    return {"kind": kind, "what": error.what, "fix": error.fix, "code": error.code}


def error_from_json(sent: Mapping[str, str], unknown: type[AttnserveError]) -> AttnserveError:
    """Restore the error of another process; ``unknown`` if ``graph_passes.errors`` lacks it."""
    kind: Any = getattr(errors, sent["kind"], None)
    is_known = isinstance(kind, type) and issubclass(kind, AttnserveError)
    return (kind if is_known else unknown)(sent["what"], sent["fix"], code=sent["code"])


def serve(parent: int) -> None:
    """Answer requests until the input ends (in the child)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with(parent)
    requests = sys.stdin.buffer
    # Libraries print to stdout, which carries the answers: redirect it to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    instance: Any = None
    while True:
        try:
            request: _Creation | _MethodCall = pickle.load(requests)
        except EOFError:
            return
        try:
            match request:
                case _Creation(prepare, factory, arguments):
                    if prepare is not None:
                        prepare()
                    instance, result = factory(*arguments), None
                case _MethodCall(method, arguments):
                    result = getattr(instance, method)(*arguments)
            answer = json.dumps({"result": result})
        except AttnserveError as error:
            answer = json.dumps({"error": error_to_json(error)})
        except Exception as error:
            crash = WorkerCrashed(f"{type(error).__name__}: {error}")
            answer = json.dumps({"error": error_to_json(crash)})
        answers.write(answer + "\n")
        answers.flush()


@contextmanager
def _interrupts_blocked() -> Generator[None]:
    """Block SIGINT in this thread and in the processes that it starts (POSIX).

    ``serve`` unblocks it. A SIGINT during the start of the interpreter would end the child with
    exit status 1, like an error of the model.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
