"""``attnserve.recover`` on a tiny BERT with half of its heads and neurons."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

import attnserve  # noqa: E402
from attnserve.cli.app import main  # noqa: E402
from attnserve.fusion import fuse_for  # noqa: E402
from attnserve.literals import TrainedPrecision  # noqa: E402
from attnserve.models.artifact import open_artifact  # noqa: E402
from attnserve.models.checksums import sha256  # noqa: E402
from attnserve.models.library_files import LIBRARY_FILES  # noqa: E402
from attnserve.models.model_card import CARD  # noqa: E402
from attnserve.models.onnx_files import load_model, save_model  # noqa: E402
from attnserve.models.training_result import TrainingResult  # noqa: E402
from attnserve.planning import recover_command  # noqa: E402
from attnserve.precision.convert import precision_of  # noqa: E402
from attnserve.recovery import training  # noqa: E402
from attnserve.recovery.operators.registry import OPERATORS  # noqa: E402
from attnserve.recovery.verification import VerifiedModel  # noqa: E402
from attnserve.runtime.inference_precision import (  # noqa: E402
    compute_in_bfloat16,
    computes_in_bfloat16,
)
from graph_passes.errors import AttnserveError, CheckFailed, InvalidModel  # noqa: E402
from tests.attnserve.cli.commands import without_torch  # noqa: E402
from tests.attnserve.qualities import fidelity_of, quality_of  # noqa: E402
from tests.errors import raises  # noqa: E402
from tests.files import last_entry, read_record  # noqa: E402
from tests.texts import write_sentences  # noqa: E402

SAMPLES = Path(__file__).parents[2] / "fixtures" / "stories260K.npz"

MINUTES = 1.0
"""Of ``counted_clock``: about 120 steps and 8 measurements, in few real seconds."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, counted_clock: None) -> None:
    """``counted_clock``, and training in float32."""
    monkeypatch.setattr(training, "has_bfloat16_product", lambda: False)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("texts") / "texts.txt", 1500)


@pytest.fixture(scope="module")
def pruned(tiny: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "pruned"
    attnserve.optimize(tiny, folder, prune=0.5, ffn=0.5, calib=texts)
    return folder


def test_weights_that_are_nodes_are_trained(pruned: Path, tiny: Path, texts: Path, tmp_path: Path):
    """Some converters write all weights as Constant nodes."""
    model = onnx.load(pruned / "model.onnx")
    nodes = [
        onnx.helper.make_node("Constant", [], [w.name], value=w) for w in model.graph.initializer
    ]
    nodes += model.graph.node
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "constants.onnx")
    report = attnserve.recover(
        tmp_path / "constants.onnx", tmp_path / "out", teacher=tiny, data=texts, minutes=0
    )
    assert report.training.states == 2 and report.before.mean_cosine < 0.999


def test_model_that_is_computed_in_bfloat16_is_trained_in_float32(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path
):
    """It is compared with PyTorch in float32; its quality is measured as it is served."""
    pytest.importorskip("openvino")
    model = load_model(pruned / "model.onnx")
    compute_in_bfloat16(model)
    save_model(model, tmp_path / "bfloat16.onnx")
    report = attnserve.recover(
        tmp_path / "bfloat16.onnx", tmp_path / "out", teacher=tiny, data=texts, minutes=0
    )
    assert report.training.states == 2 and report.before.mean_cosine < 0.999
    assert computes_in_bfloat16(load_model(tmp_path / "out" / "model.onnx"))


@pytest.mark.timing(seconds=10)
@pytest.mark.usefixtures("clock")
def test_recover_raises_the_agreement_with_an_index(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path
):
    lines = texts.read_text().splitlines()
    roles = ["query" if at % 3 == 0 else "document" for at in range(len(lines))]
    rows = ["role\ttext", *(f"{role}\t{line}" for role, line in zip(roles, lines, strict=True))]
    (split := tmp_path / "split.tsv").write_text("\n".join(rows))
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=tiny, data=split, measure="index", minutes=MINUTES
    )
    (old,), (new,) = report.before.qualities, report.after.qualities
    assert old.measure == new.measure == "index" and new.documents == old.documents > 100
    assert new.value > old.value and new.also["overlap"] > old.also["overlap"]
    assert last_entry(tmp_path / "out")["quality"]["documents"] == new.documents


@pytest.mark.timing(seconds=20)
@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("clock")
def test_recover_pruned_bert_raises_quality_on_unseen_rows(
    pruned: Path,
    tiny: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    half: torch.dtype | None,
):
    monkeypatch.setattr(training, "LEARNING_RATE", 3e-3)
    monkeypatch.setattr(training, "half_type", lambda _: half)
    # The first scale makes every gradient overflow; smaller ones are tried.
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    dtypes: set[torch.dtype | None] = set()
    autocast = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda device, dtype: dtypes.add(dtype) or autocast(device, dtype)
    )
    stages: list[tuple[str, int, int]] = []
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=tiny, data=texts, minutes=MINUTES,
        progress=lambda *stage: stages.append(stage),
    )  # fmt: skip
    assert report.record.gain
    assert dtypes == {half} - {None}
    assert report.before.quality is not None and report.after.quality is not None
    assert report.after.quality.split == "verify"
    assert report.after.quality.also["r2"] > report.before.quality.also["r2"] + 0.05
    losses = [loss for _, loss, _ in report.training.history]
    assert losses[-1] < 0.9 * losses[0]
    assert report.training.loss < report.training.first_loss
    assert report.training.states == 2
    assert any(stage == "train (s)" and total == 60 for stage, _, total in stages)
    # The same graph with other weights, and its record.
    ours, theirs = (load_model(open_artifact(f)) for f in (tmp_path / "out", pruned))
    assert [n.op_type for n in ours.graph] == [n.op_type for n in theirs.graph]
    assert [value.name for value in ours.graph.inputs] == [v.name for v in theirs.graph.inputs]
    assert [value.name for value in ours.graph.outputs] == [v.name for v in theirs.graph.outputs]
    assert ours.graph.initializers.keys() == theirs.graph.initializers.keys()
    verified = attnserve.verify(tiny, tmp_path / "out", data=texts)
    assert verified.mean_cosine > attnserve.verify(tiny, pruned, data=texts).mean_cosine
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        pruned / "tokenizer.json"
    ).read_bytes()
    before, after = read_record(pruned)["lineage"], read_record(tmp_path / "out")["lineage"]
    assert after[:-1] == before
    assert after[-1]["rewrite"] == "recover"
    assert after[-1]["plan"] == before[-1]["plan"]
    assert after[-1]["quality"]["value"] == report.after.quality.value


def test_recover_without_time_returns_an_equal_model(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path
):
    report = attnserve.recover(pruned, tmp_path / "o.onnx", teacher=tiny, data=texts, minutes=0)
    assert not report.record.gain and report.training.steps == 0
    assert report.after == report.before
    assert "no gain" in report.record.verdict
    assert len(report.record.warnings) == 1  # no gain
    assert attnserve.verify(pruned, tmp_path / "o.onnx", data=texts).mean_cosine == 1.0


@pytest.mark.timing(seconds=30)
@pytest.mark.usefixtures("clock")
def test_int8_recover_raises_quality_of_the_served_model_on_unseen_rows(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "LEARNING_RATE", 3e-3)
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=tiny, data=texts, minutes=MINUTES, precision="int8"
    )
    assert report.record.gain
    assert report.before.quality is not None and report.after.quality is not None
    assert report.after.quality.also["r2"] > report.before.quality.also["r2"] + 0.05
    assert (report.record.int8_weight_bits, report.record.int8_activations) == (7, "static")
    written = load_model(open_artifact(tmp_path / "out"))
    assert "int8" in precision_of(written)
    last = last_entry(tmp_path / "out")
    assert last["rewrite"] == "recover+int8"
    assert last["plan"]["precision"] == "int8" and last["int8_weight_bits"] == 7
    assert last["after"]["bytes"] < last_entry(pruned)["after"]["bytes"] / 2
    # What was written is better than the plain conversion, on all rows.
    plain = attnserve.optimize(pruned, tmp_path / "plain", precision="int8", calib=texts)
    cosines = [attnserve.verify(tiny, folder, data=texts).mean_cosine
               for folder in (tmp_path / "out", plain.output)]  # fmt: skip
    assert cosines[0] > cosines[1]


@pytest.mark.timing(seconds=30)
@pytest.mark.usefixtures("clock")
def test_int8_recover_of_the_original_itself_lowers_the_rounding_errors(
    tiny: Path, texts: Path, tmp_path: Path
):
    report = attnserve.recover(
        tiny, tmp_path / "out", teacher=tiny, data=texts, minutes=MINUTES, precision="int8"
    )
    assert report.record.gain
    assert report.training.loss < 0.95 * report.training.first_loss
    assert report.training.learning_rate < training.LEARNING_RATE / 2


def test_int8_recover_without_gain_returns_the_plain_conversion(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path
):
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=tiny, data=texts, minutes=0, precision="int8"
    )
    assert not report.record.gain and report.record.int8_weight_bits == 7
    assert len(report.record.warnings) == 1  # no gain
    plain = attnserve.optimize(pruned, tmp_path / "plain", precision="int8", calib=texts)
    assert attnserve.verify(plain.output, tmp_path / "out", data=texts).mean_cosine == 1.0


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_recover_warns_of_a_file_for_openvino_that_was_not_measured(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, precision: TrainedPrecision
):
    pytest.importorskip("openvino")
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=tiny, data=texts, minutes=0, precision=precision,
        openvino=True,
    )  # fmt: skip
    found = [warning for warning in report.record.warnings if "openvino" in warning]
    assert len(found) == (precision == "int8")
    assert all("not measured in openvino: use the model in onnxruntime" in each for each in found)


def test_recovered_folder_has_metadata_and_the_files_of_libraries(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path
):
    folder = tmp_path / "out"
    report = attnserve.recover(pruned, folder, teacher=tiny, data=texts, minutes=0)
    stated = {one.key: one.value for one in onnx.load(report.output).metadata_props}
    assert stated["attnserve.version"] == attnserve.__version__
    assert stated["attnserve.parent_sha256"] == sha256(pruned / "model.onnx")
    plan = open_artifact(folder).plan_id
    assert plan and stated["attnserve.plan"] == plan
    written = [name for name in LIBRARY_FILES if (folder / name).exists()]
    assert {"modules.json", "1_Pooling/config.json"} < {*written}
    assert all((folder / name).read_bytes() == (pruned / name).read_bytes() for name in written)
    assert (folder / CARD).read_text(encoding="utf-8").count("| recover |") == 1


def test_int8_recover_fuses_for_the_cpu_also_if_a_gpu_trains(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fused: list[list[str]] = []

    def fuse(*arguments: Any) -> Any:
        model, passes = fuse_for(*arguments)
        fused.append([node.op_type for node in model.graph])
        return model, passes

    monkeypatch.setattr(recover_command, "fuse_for", fuse)
    for provider in ("cpu", "cuda"):
        with suppress(AttnserveError):  # without a GPU
            attnserve.recover(
                pruned, tmp_path / provider, teacher=tiny, data=texts, minutes=0, precision="int8",
                provider=provider,
            )  # fmt: skip
    assert fused[0] == fused[1]


def test_teacher_that_is_not_the_source_is_refused(
    pruned: Path, tiny: Path, tiny_export: Callable[..., Path], texts: Path, tmp_path: Path
):
    def refuse(model: Path, teacher: Path) -> None:
        with raises(InvalidModel, "recovery.teacher"):
            attnserve.recover(model, tmp_path / "o.onnx", teacher=teacher, data=texts, minutes=0)
        assert not (tmp_path / "o.onnx").exists()

    refuse(pruned, tiny_export("eager", "torchscript", 14))
    # The same graph with other weights, which lie in a file of their own.
    path = external(tiny, tmp_path / "teacher" / "model.onnx", "weights")
    attnserve.optimize(path, tmp_path / "model", prune=0.5, calib=texts, tokenizer=tiny)
    weights = path.with_name("weights")
    weights.write_bytes(bytes(weights.stat().st_size))
    refuse(tmp_path / "model", path)


def test_half_precision_without_types_inside_the_graph_is_recovered(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path
):
    """As graphs of tools that keep no value_info."""
    attnserve.optimize(pruned, tmp_path / "half", precision="float16", force=True)
    path = tmp_path / "half" / "model.onnx"
    proto = onnx.load(path)
    assert any(one.data_type == onnx.TensorProto.FLOAT16 for one in proto.graph.initializer)
    del proto.graph.value_info[:]
    onnx.save(proto, path)
    record = read_record(path.parent)
    del record["files"]
    path.with_name("attnserve.json").write_text(json.dumps(record))
    report = attnserve.recover(path, tmp_path / "out", teacher=tiny, data=texts, minutes=0.02)
    assert report.training.states == 2


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("rate", [10.0, 1e30])
def test_failed_training_never_returns_worse_weights(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, rate: float,
    precision: TrainedPrecision, monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(training, "LEARNING_RATE", rate)
    call: Callable[[], Any] = lambda: attnserve.recover(  # noqa: E731
        pruned,
        tmp_path / "out",
        teacher=tiny,
        data=texts,
        minutes=MINUTES / 4,
        precision=precision,
    )
    if rate > 1e20:
        with pytest.raises(CheckFailed) as caught:
            call()
        assert caught.value.code == "recovery.not_finite"
        assert not (tmp_path / "out").exists()
        return
    report = call()
    assert not report.record.gain and report.after == report.before
    cosine = attnserve.verify(pruned, tmp_path / "out", data=texts).mean_cosine
    assert cosine > 0.99 if precision == "int8" else cosine == 1.0


@pytest.mark.usefixtures("clock")
def test_interrupted_training_continues_from_its_checkpoint(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "LEARNING_RATE", 3e-3)
    output = tmp_path / "out"

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage.startswith("train") and done > 45:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attnserve.recover(
            pruned, output, teacher=tiny, data=texts, minutes=MINUTES, progress=interrupt
        )
    assert not output.exists()
    report = attnserve.recover(pruned, output, teacher=tiny, data=texts, minutes=0)
    assert report.record.gain and report.training.steps > 10
    # The checkpoint is used up.
    report = attnserve.recover(pruned, output, teacher=tiny, data=texts, minutes=0, force=True)
    assert report.training.steps == 0


@pytest.mark.timing(seconds=20)
@pytest.mark.usefixtures("clock")
def test_recover_learns_logits_of_answer_positions(
    tiny_bert: Callable[..., Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Outputs (B, T): their last axis has another length in each batch."""
    monkeypatch.setattr(training, "LEARNING_RATE", 3e-3)
    model = tmp_path / "qa"
    attnserve.export(tiny_bert("BertForQuestionAnswering"), model, task="question-answering")
    attnserve.optimize(model, tmp_path / "pruned", prune=0.5, ffn=0.5, calib=texts)
    report = attnserve.recover(
        tmp_path / "pruned", tmp_path / "out", teacher=model, data=texts, minutes=MINUTES / 2
    )
    assert report.after.quality is not None and report.after.quality.output.endswith("_logits")
    assert report.record.gain


@pytest.mark.timing(seconds=20)
@pytest.mark.usefixtures("clock")
def test_recover_decoder_learns_its_logits(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "LEARNING_RATE", 1e-3)
    folder = shared / "models" / "stories260K"
    model = folder / "stories260K.onnx"
    np.savez(tmp_path / "ids.npz", idx=np.load(SAMPLES)["idx"][:60].astype(np.int64))
    calib = tmp_path / "ids.npz"
    attnserve.optimize(model, tmp_path / "pruned", prune=0.4, calib=calib)
    report = attnserve.recover(
        tmp_path / "pruned", tmp_path / "out", teacher=model, data=calib, minutes=MINUTES / 4
    )
    assert report.before.quality is not None and report.after.quality is not None
    assert report.after.quality.measure == "top1"
    assert report.record.gain and report.training.states == 5
    before, after = (1 - q.also["kl"] for q in (report.before.quality, report.after.quality))
    assert after < 0.8 * before


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"minutes": -1}, "recovery.range"),
        ({"minutes": float("nan")}, "recovery.range"),
        ({"measure": "score"}, "recovery.range"),
        ({"measure": "tau"}, "quality.no_lists"),
        ({"data": "few"}, "recovery.few_rows"),
        ({"data": "empty"}, None),
        ({"data": "missing"}, "data.missing"),
        ({"data": []}, "recovery.no_data"),
        ({"data": "twice"}, "data.repeated"),
        ({"data": "same rows"}, "recovery.few_rows"),
        ({"teacher": "vit"}, None),
        ({"output": "pruned"}, "output.is_input"),
        ({"output": "teacher"}, "output.is_input"),
        ({"model": "quantized"}, "recovery.operator"),
        ({"model": "quantized", "precision": "int8"}, "precision.already"),
    ],
    ids=str,
)
def test_bad_input_is_refused_and_nothing_is_written(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, change: dict[str, Any], code: str | None
):
    files: dict[str, Callable[[], Any]] = {
        "twice": lambda: [texts, texts],
        "same rows": lambda: [
            write(tmp_path / f"{i}.txt", "\n".join(words[i:] + words[:i])) for i in range(6)
        ],
        "few": lambda: write(tmp_path / "few.txt", "a man\na dog\n"),
        "empty": lambda: write(tmp_path / "empty.txt", ""),
        "missing": lambda: tmp_path / "none.txt",
        "pruned": lambda: pruned,
        "teacher": lambda: tiny / "model.onnx",
        "vit": lambda: Path(__file__).parents[2] / "fixtures/onnx/vit-dynamo23-sdpa.onnx",
        "quantized": lambda: _int8(tiny, texts, tmp_path),
    }
    words = ["a", "the", "man", "woman", "dog", "cat", "is", "playing", "with"]
    change = {
        name: files[value]() if str(value) in files and name != "measure" else value
        for name, value in change.items()
    }
    given: dict[str, Any] = {
        "model": pruned, "output": tmp_path / "out", "teacher": tiny, "data": texts, "minutes": 0,
        "force": True, **change,
    }  # fmt: skip
    model, output = given.pop("model"), given.pop("output")
    with pytest.raises(AttnserveError) as caught:
        attnserve.recover(model, output, **given)
    assert caught.value.exit_code == 2 and caught.value.fix
    assert code is None or caught.value.code == code
    assert not (tmp_path / "out").exists()


def _int8(tiny: Path, texts: Path, folder: Path) -> Path:
    attnserve.optimize(tiny, folder / "int8", precision="int8", calib=texts)
    return folder / "int8"


def external(source: Path, target: Path, data: str) -> Path:
    """The model of a folder, with its weights in the file ``data`` beside it."""
    target.parent.mkdir()
    model = onnx.load(source / "model.onnx")
    onnx.save(model, target, save_as_external_data=True, location=data)
    return target


def test_weights_of_the_teacher_are_never_overwritten(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path
):
    """Also if it was renamed, so that its data file is called like that of the output."""
    folder = external(tiny, tmp_path / "teacher" / "original.onnx", "model.onnx.data").parent
    before = (folder / "model.onnx.data").read_bytes()
    for force, code in ((False, "output.exists"), (True, "output.is_input")):
        with raises(AttnserveError, code):
            attnserve.recover(
                pruned, folder, teacher=folder / "original.onnx", data=texts, minutes=0, force=force
            )
    stray = tmp_path / "stray"
    stray.mkdir()
    (stray / "model.onnx.data").write_bytes(b"of somebody else")
    with raises(AttnserveError, "output.exists"):
        attnserve.recover(pruned, stray, teacher=tiny, data=texts, minutes=0)
    assert (folder / "model.onnx.data").read_bytes() == before
    assert not (folder / "model.onnx").exists()


def test_external_data_stays_external(pruned: Path, tiny: Path, texts: Path, tmp_path: Path):
    folder = external(pruned, tmp_path / "external" / "model.onnx", "weights.bin").parent
    attnserve.recover(folder, tmp_path / "out", teacher=tiny, data=texts, minutes=0)
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size > 10_000


def test_numbers_that_are_not_finite_are_null_in_json():
    result = TrainingResult(
        first_loss=float("inf"), loss=0.5, history=[(1.0, float("nan"), float("inf"))]
    )
    shown = result.record.to_json()
    assert shown["first_loss"] is None and shown["history"] == [[1.0, None, None]]
    json.dumps(shown, allow_nan=False)


def test_a_gain_in_one_output_at_the_cost_of_another_is_none():
    def verification(**values: float) -> VerifiedModel:
        each = [
            quality_of("r2", v, lower=v - 0.1, rows=99, output=name)
            for name, v in sorted(values.items(), key=lambda item: item[1])
        ]
        return VerifiedModel(fidelity_of(*each))

    before = verification(a=0.5, b=0.95)
    assert verification(a=0.6, b=0.9).is_better_than(before)  # b is in its interval
    assert not verification(a=0.6, b=0.7).is_better_than(before)
    assert not verification(a=0.45, b=0.99).is_better_than(before)
    assert not before.is_better_than(before)


def test_command_prints_one_json_object(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["recover", pruned, "--teacher", tiny, "--data", texts, "--minutes", "0",
               "-o", tmp_path / "out"]  # fmt: skip
    assert main([str(argument) for argument in (*command, "--json")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["output"] == str(tmp_path / "out" / "model.onnx")
    assert shown["quality"]["split"] == "prove" and shown["gain"] is False
    assert main([str(argument) for argument in command]) == 2  # the output exists
    assert "--force" in capsys.readouterr().err


@pytest.mark.process
def test_command_without_torch_names_the_extra(tmp_path: Path):
    options = ("--teacher", "t.onnx", "--data", "d.txt", "-o", tmp_path / "o")
    done = without_torch("recover", "m.onnx", *options)
    assert done.returncode == 2
    assert "attnserve[torch]" in done.stderr and len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("loss", "rate"),
    [(-1e-9, 0.0), (0.0, 0.0), (0.01, 2.5e-5), (1.0, 2.5e-4), (4.0, 3e-4), (1e9, 3e-4)],
)
def test_learning_rate_is_the_root_of_the_first_loss_up_to_a_limit(loss: float, rate: float):
    assert training.rate_for(loss) == pytest.approx(rate, rel=1e-9)


@pytest.mark.usefixtures("clock")
def test_training_that_makes_weights_worse_starts_again_more_slowly(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "LEARNING_RATE", 0.3)
    monkeypatch.setattr(training, "SLOWER", 100.0)
    report = attnserve.recover(pruned, tmp_path / "out", teacher=tiny, data=texts, minutes=MINUTES)
    assert report.training.restarts == 1 and report.record.gain
    losses = [loss for _, _, loss in report.training.history]
    assert min(losses[:2]) > report.training.first_loss > report.training.loss == min(losses)


def test_is_stuck_needs_six_measurements_without_progress():
    falling = [0.5, 0.48, 0.46, 0.44, 0.42, 0.4, 0.38, 0.36]
    assert not training.is_stuck(falling, 50, 60)  # also if all are worse than the initial loss
    flat = [0.5, 0.3, *[0.31] * 6]
    assert training.is_stuck(flat, 50, 60)
    assert not training.is_stuck(flat, 20, 60)
    assert not training.is_stuck(flat[:6], 50, 60)


def test_outputs_of_the_teacher_are_kept_in_half_precision_if_they_fit():
    fits, too_large = np.float32([0.1, -60_000]), np.float32([0.1, 70_000])
    kept = [training.halved(array) for array in (fits, too_large, np.float32([0.1, -np.inf]))]
    assert [array.dtype for array in kept] == [np.float16, np.float32, np.float32]
    assert np.allclose(kept[0], fits, rtol=2**-11)
    assert training.halved(np.array([2**40])).dtype == np.int64


def test_operator_that_returns_nan_is_refused_and_nothing_is_written(
    pruned: Path, tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(OPERATORS, ("", "LayerNormalization"), lambda _, x, *rest: x * np.nan)
    with raises(CheckFailed, "recovery.mismatch", "nan"):
        attnserve.recover(pruned, tmp_path / "out", teacher=tiny, data=texts, minutes=0)
    assert not (tmp_path / "out").exists()
