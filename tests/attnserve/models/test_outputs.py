"""Outputs: what is refused, and that nothing is half-written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attnserve.models.artifact import copy_companions, open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import check_output, output_file, staged
from attnserve.models.record import Record, merged_record, write_record
from graph_passes.errors import InvalidOutput
from tests.errors import raises
from tests.files import read_record, tree


def test_output_above_the_folder_onnx_is_refused(hub: Path):
    """It would hide the original."""
    artifact = open_artifact(hub)
    for output in (hub, hub / "new.onnx"):
        with raises(InvalidOutput, "output.is_input"):
            output_file(output, artifact, load_model(artifact), force=True)


def test_output_of_a_hub_model_gets_its_tokenizer(hub: Path, tmp_path: Path):
    artifact, output = open_artifact(hub), tmp_path / "out"
    output.mkdir()
    copy_companions(artifact, output)
    assert {path.name for path in output.iterdir()} == {"config.json", "tokenizer.json"}
    (output / "tokenizer.json").write_text("{}")
    with raises(InvalidOutput, "output.exists", "tokenizer.json"):
        output_file(output, artifact, load_model(artifact))


def target(output: Path, source: Path, *, force: bool = False) -> Path:
    return output_file(output, open_artifact(source), load_model(source), force=force)


def test_output_file_folder_is_model_onnx_in_it(plain: Path, tmp_path: Path):
    assert target(tmp_path / "new", plain) == tmp_path / "new" / "model.onnx"
    assert target(tmp_path / "new" / "a.onnx", plain) == tmp_path / "new" / "a.onnx"
    assert not (tmp_path / "new").exists()
    (tmp_path / "new.onnx").mkdir()
    assert target(tmp_path / "new.onnx", plain) == tmp_path / "new.onnx" / "model.onnx"


def test_output_file_input_under_any_name_is_refused(plain: Path, external: Path, tmp_path: Path):
    (tmp_path / "soft.onnx").symlink_to(plain)
    (tmp_path / "hard.onnx").hardlink_to(plain)
    (tmp_path / "folder").symlink_to(plain.parent)
    names = ("plain", "plain/model.onnx", "soft.onnx", "hard.onnx", "folder")
    for name in (*names, "plain/../plain/model.onnx"):
        with raises(InvalidOutput, "output.is_input"):
            target(tmp_path / name, plain, force=True)
    other = plain.rename(plain.with_name("encoder.onnx"))
    with raises(InvalidOutput, "output.is_input"):
        target(plain.parent, other, force=True)
    renamed = external.rename(external.with_name("source.onnx"))
    with raises(InvalidOutput, "output.is_input", "model.onnx.data"):
        target(external.with_name("model.onnx"), renamed, force=True)


@pytest.mark.parametrize("name", ["model.onnx", "attnserve.json"])
def test_output_file_existing_file_needs_force(plain: Path, tmp_path: Path, name: str):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_text("{}")
    with raises(InvalidOutput, "output.exists"):
        target(tmp_path / "new", plain)
    assert target(tmp_path / "new", plain, force=True) == tmp_path / "new" / "model.onnx"


def test_output_file_record_without_model_needs_force(plain: Path, tmp_path: Path):
    (tmp_path / "new").mkdir()
    write_record(tmp_path / "new", Record(pooling="cls"))
    with raises(InvalidOutput, "output.exists", "attnserve.json"):
        target(tmp_path / "new" / "other.onnx", plain)


def test_output_file_different_tokenizer_needs_force(plain: Path, tmp_path: Path):
    (plain.parent / "tokenizer.json").write_text("ours")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tokenizer.json").write_text("ours")
    target(tmp_path / "new", plain)  # equal content is not lost
    (tmp_path / "new" / "tokenizer.json").write_text("theirs")
    with raises(InvalidOutput, "output.exists", "tokenizer.json"):
        target(tmp_path / "new", plain)


@pytest.mark.parametrize("path", ["/dev/null/x", "/dev/null/x/model.onnx", "/proc/none/a.onnx"])
def test_output_that_cannot_be_written_is_refused(plain: Path, path: str):
    with pytest.raises(InvalidOutput):
        output = target(Path(path), plain)
        with staged(output.parent):  # some file systems refuse only the write
            pass


def test_check_output_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with raises(InvalidOutput, "output.not_writable"):
        check_output(tmp_path / "file" / "new.onnx")


def test_merged_record_keeps_the_records_of_other_models(plain: Path):
    """The newest record is at the top level, the others are under "others"."""
    folder = plain.parent
    write_record(folder, Record(source="model.onnx"))
    for name in ("a.onnx", "b.onnx", "a.onnx"):
        file = target(folder / name, plain, force=True)
        shutil.copyfile(plain, file)
        write_record(folder, merged_record(file, Record(source=name, files={name: "sha"})))
    record = read_record(folder)
    assert record["files"] == {"a.onnx": "sha"}
    assert set(record["others"]) == {"model.onnx", "b.onnx"}
    for name in ("model.onnx", "a.onnx", "b.onnx"):
        assert open_artifact(folder / name).record.source == name


def test_staged_success_moves_all_files(tmp_path: Path):
    with staged(tmp_path / "a" / "b") as stage:
        (stage / "model.onnx").write_text("m")
        (stage / "attnserve.json").write_text("{}")
        assert list((tmp_path / "a" / "b").iterdir()) == [stage]
    assert tree(tmp_path) == {
        "a": None,
        "a/b": None,
        "a/b/attnserve.json": b"{}",
        "a/b/model.onnx": b"m",
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
@pytest.mark.parametrize("folder", ["", "kept/a/b"])
def test_staged_failure_changes_nothing(tmp_path: Path, folder: str, error: type[BaseException]):
    (tmp_path / "kept").mkdir()
    (tmp_path / "model.onnx").write_text("old")
    before = tree(tmp_path)
    with pytest.raises(error), staged(tmp_path / folder) as stage:
        (stage / "model.onnx").write_text("half")
        raise error
    assert tree(tmp_path) == before


def test_staged_finish_of_two_writers_keeps_both_records(tmp_path: Path):
    """A writer reads the record of the folder only after the other has moved its own."""
    folder, started = tmp_path / "out", threading.Event()

    def write(name: str) -> None:
        def finish(stage: Path) -> None:
            record = merged_record(folder / name, Record(files={name: ""}))
            if name == "a.onnx":
                started.set()
                time.sleep(0.2)
            write_record(stage, record)

        with staged(folder, finish) as stage:
            (stage / name).write_text(name)

    first = threading.Thread(target=write, args=("a.onnx",))
    first.start()
    assert started.wait(10)
    write("b.onnx")
    first.join()
    record = read_record(folder)
    assert list(record["files"]) == ["b.onnx"] and list(record["others"]) == ["a.onnx"]


def test_staged_files_are_on_disk_before_they_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    with staged(tmp_path / "new") as stage:
        (stage / "model.onnx").write_text("m")
    paths = (tmp_path / "new" / "model.onnx", tmp_path / "new")
    assert flushed == [path.stat().st_ino for path in paths]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_between_moves_loses_neither_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """The old record beside the new model, or the reverse, would be a model with wrong settings."""

    def ends(number: int, frame: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    names = ("attnserve.json", "model.onnx", "model.onnx.data")
    for name in names:
        (tmp_path / name).write_text("old")
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        signal.raise_signal(number)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    before = signal.signal(number, ends)  # a shell may ignore the interrupts of background jobs
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)), staged(tmp_path) as stage:
            for name in names:
                (stage / name).write_text("new")
    finally:
        signal.signal(number, before)
    assert tree(tmp_path) == dict.fromkeys(names, b"new")


def test_interrupt_while_a_file_is_flushed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("attnserve.json", "model.onnx"):
        (tmp_path / name).write_text("old")
    before = tree(tmp_path)

    def interrupted(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "model.onnx":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt), staged(tmp_path) as stage:
        for name in ("attnserve.json", "model.onnx"):
            (stage / name).write_text("new")
    assert tree(tmp_path) == before


def test_temporary_folder_of_a_killed_process_is_deleted(tmp_path: Path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from attnserve.models.outputs import staged\n"
        "with staged(Path(sys.argv[1])) as stage:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    (left,) = tmp_path.iterdir()
    with staged(tmp_path):  # its process may not have locked it yet
        assert left.exists()
    os.utime(left, (0, 0))
    with staged(tmp_path) as own:
        assert not left.exists()
        os.utime(own, (0, 0))
        with staged(tmp_path):
            assert own.exists()  # its process lives
    assert not list(tmp_path.iterdir())


def test_staged_full_disk_is_invalid_output(tmp_path: Path):
    before = tree(tmp_path)
    with (
        raises(InvalidOutput, "output.write_failed", "No space left on device"),
        staged(tmp_path / "new"),
    ):
        raise OSError(28, "No space left on device")
    assert tree(tmp_path) == before
