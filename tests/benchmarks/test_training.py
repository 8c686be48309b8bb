"""benchmarks/training on a tiny corpus of word-for-word translations."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import attnserve
from benchmarks import _common
from benchmarks.training import exported, language_model, translation
from benchmarks.training.data import BOS, EOS, FILES, PAD, Corpus, batches, read_corpus, tensors
from benchmarks.training.loop import Training
from benchmarks.training.variants import EXPERIMENTS, SAME, VARIANTS, Settings, find
from docs.hooks import training as pages
from tests.files import write_lines

WORDS = {"man": "Mann", "dog": "Hund", "house": "Haus", "runs": "rennt", "red": "rot", "a": "ein"}

TINY = Settings(
    layers=4, width=64, hidden=32, dropout=0.1, vocabulary=280, batch_tokens=128, steps=4,
    warm_up=2, rate=3e-3, evaluate_every=2, longest=32,
)  # fmt: skip


def write_texts(folder: Path) -> None:
    """The files of ``FILES`` with 40, 6 and 6 pairs."""
    choice = random.Random(0)
    for part, name in FILES.items():
        rows = [choice.choices(list(WORDS), k=choice.randint(2, 6)) for _ in range(6)]
        if part == "train":
            rows += [choice.choices(list(WORDS), k=choice.randint(2, 6)) for _ in range(34)]
        for language, texts in (
            ("en", [" ".join(row) for row in rows]),
            ("de", [" ".join(WORDS[word] for word in row) for row in rows]),
        ):
            (folder / f"{name}.{language}").write_text("\n".join(texts) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("multi30k")
    write_texts(path)
    return path


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return read_corpus(folder, folder / "cache", vocabulary=280, longest=32)


def quiet(_: str) -> None:
    pass


def interrupt_after(points: int) -> Callable[[str], None]:
    """A ``say`` that interrupts the run at a point of its curve."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) > points:
            raise KeyboardInterrupt

    return say


def test_corpus_is_encoded_without_loss_and_batches_hold_every_pair_once(corpus: Corpus):
    ids = [target for _, target in corpus.test]
    assert [text.strip() for text in corpus.tokenizer.decode_batch(ids)] == corpus.references
    rows = batches(corpus.train, 128, seed=1)
    assert sorted(row for group in rows for row in group) == list(range(len(corpus.train)))
    for group in rows:
        source, target = tensors([corpus.train[row] for row in group])
        assert max(source.numel(), target[:, 1:].numel()) <= 128
        assert (source == EOS).sum() == len(group)


def test_training_lowers_the_loss_and_translates_as_it_was_trained(corpus: Corpus):
    """Half of the loss of a uniform guess."""
    settings = replace(TINY, layers=1, steps=60, evaluate_every=20, warm_up=10)
    training = Training(VARIANTS["vanilla"], settings, 0, corpus)
    assert training.run(say=quiet)
    losses = [point["val_loss"] for point in training.curve]
    assert losses[-1] < losses[0] and losses[-1] < math.log(corpus.vocabulary) / 2
    # Greedy decoding gives the tokens that the model prefers when it reads its own output.
    source, _ = tensors(corpus.test[:3])
    for row, ids in enumerate(training.model.translate(source, 20)):
        _, target = tensors([([], ids)])
        with torch.no_grad():
            best = training.model(source[row : row + 1], target[:, :-1])[0].argmax(-1)
        assert best[: len(ids)].tolist() == ids


def test_no_position_of_the_decoder_sees_later_tokens(corpus: Corpus):
    model = Training(VARIANTS["vanilla"], TINY, 0, corpus).model.eval()
    source, target = tensors(corpus.train[:2])
    changed = target.clone()
    changed[:, 3:] = 5
    with torch.no_grad():
        before, after = model(source, target), model(source, changed)
    assert torch.allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert not torch.allclose(before[:, 3:], after[:, 3:], atol=1e-3)


@pytest.mark.parametrize("name", ["vanilla", "ght-ps"])
def test_interrupted_run_resumes_to_the_same_model(name: str, corpus: Corpus, tmp_path: Path):
    settings = replace(TINY, layers=1, steps=8)
    whole = Training(VARIANTS[name], settings, 0, corpus)
    whole.run(say=quiet)
    for points in (1, 3):  # before and after heads are pruned
        with pytest.raises(KeyboardInterrupt):
            Training(VARIANTS[name], settings, 0, corpus).run(
                tmp_path / "run.pt", say=interrupt_after(points)
            )
        resumed = Training(VARIANTS[name], settings, 0, corpus)
        assert resumed.run(tmp_path / "run.pt", resume=True, say=quiet)
        for key in ("train_loss", "val_loss"):  # losses differ by rounding only
            expected = [point[key] for point in whole.curve]
            assert [point[key] for point in resumed.curve] == pytest.approx(expected, rel=1e-5)


def test_checkpoint_of_other_settings_is_not_used(corpus: Corpus, tmp_path: Path):
    vanilla = VARIANTS["vanilla"]
    first = Training(vanilla, replace(TINY, layers=1), 0, corpus)
    first.run(tmp_path / "run.pt", say=quiet)
    other = Training(vanilla, replace(TINY, layers=1, steps=2), 0, corpus)
    other.run(tmp_path / "run.pt", resume=True, say=quiet)
    assert [point["step"] for point in other.curve] == [2]


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_builds_and_steps(name: str, corpus: Corpus):
    variant = VARIANTS[name]
    training = Training(variant, replace(TINY, steps=2), 0, corpus)
    before = sum(part.numel() for part in training.model.parameters())
    assert training.run(say=quiet)
    assert math.isfinite(training.curve[-1]["val_loss"])
    if variant.keep != "all":
        assert {sum(mask) for mask in training.masks.values()} == {2}
        assert sum(part.numel() for part in training.model.parameters()) < before


def test_every_claim_is_of_a_variant_and_every_variant_has_a_claim():
    named = {name for claims in EXPERIMENTS.values() for name in claims}
    assert {variant.name for variant in find(named)} == set(VARIANTS)
    assert find(["concatenated", "vanilla"]) == [VARIANTS["vanilla"]] and set(SAME) <= named


def test_command_writes_results_and_resumes(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    pytest.importorskip("sacrebleu", reason="scores translations")
    monkeypatch.setattr(translation, "Settings", lambda: replace(TINY, layers=1))
    monkeypatch.setattr(_common, "RESULTS", tmp_path)
    command = ["--data", str(folder), "--cache", str(tmp_path / "cache"), "--seeds", "0"]
    command += ["--only", "concatenated", "--resume"]
    assert translation.main([*command, "--minutes", "0"]) == 0
    path = tmp_path / "training" / "translation-vanilla-0.json"
    assert not path.exists() and "continue with --resume" in capsys.readouterr().out
    assert translation.main(command) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [point["step"] for point in result["curve"]] == [2, 4]
    assert {"train_loss", "val_loss"} < set(result["curve"][0])
    assert 0 <= result["bleu"] <= 100 and "tok:13a" in result["signature"]
    assert min(result[key] for key in ("parameters", "macs", "steps_per_s")) > 0
    assert {"threads", "torch", "shared", "load_1min"} <= set(result["machine"])
    capsys.readouterr()
    assert translation.main(command) == 0
    assert "finished before" in capsys.readouterr().out


@pytest.mark.export
@pytest.mark.parametrize("name", ["vanilla", "collaborative-quarter"])
def test_exported_translator_is_certified_and_translates_as_the_trained_one(
    name: str, corpus: Corpus, tmp_path: Path
):
    pytest.importorskip("sacrebleu", reason="scores translations")
    settings = replace(TINY, layers=1, steps=60, evaluate_every=60, warm_up=10)
    training = Training(VARIANTS[name], settings, 0, corpus)
    training.run(say=quiet)
    exported.export(training, tmp_path / "model.onnx")
    expected, _ = translation.bleu(training.translations(corpus.test), corpus.references)
    assert exported.score(tmp_path / "model.onnx", corpus, settings.longest) == expected
    report = attnserve.inspect(tmp_path / "model.onnx").to_json()
    form = name.partition("-")[0].replace("vanilla", "standard")
    assert [found["form"] for found in report["attention"]] == [form, form, form]


def test_rows_of_the_translator_are_those_of_the_corpus(corpus: Corpus, tmp_path: Path):
    folder = exported.write_rows(corpus.val, tmp_path / "rows")
    arrays = [np.load(path) for path in sorted(folder.iterdir())]
    assert sum(len(each["source"]) for each in arrays) == len(corpus.val)
    for each in arrays:
        assert (each["target"] != PAD).all() and (each["target"][:, 0] == BOS).all()
        assert ((each["source"] == EOS).sum(1) == 1).all()


@pytest.mark.export
def test_language_model_is_exported_as_a_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setattr(language_model, "SIZES", {**language_model.SIZES, **sizes})
    monkeypatch.setattr(language_model, "VOCABULARY", 280)
    text = write_lines(
        tmp_path / "text.txt", [" = Title = ", *[f"{a} {b}" for a in WORDS for b in WORDS]]
    )
    known, unseen = language_model.learned_and_unseen(text)
    assert len(known) == 27 and len(unseen) == 9 and not set(known) & set(unseen)
    assert (
        language_model.main(["--text", str(text), "-o", str(tmp_path / "out"), "--epochs", "2"])
        == 0
    )
    assert "perplexity of the paragraphs that were left out" in capsys.readouterr().out
    report = attnserve.inspect(tmp_path / "out").to_json()
    assert report["missed"] == [] and len(report["attention"]) == 1


def test_language_model_needs_paragraphs(tmp_path: Path):
    (tmp_path / "text.txt").write_text("= Title =\n\none\n")
    with pytest.raises(SystemExit, match="has 1 paragraphs"):
        language_model.learned_and_unseen(tmp_path / "text.txt")


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"multi30k_train\.en does not exist"):
        read_corpus(tmp_path, tmp_path, vocabulary=280, longest=32)


def test_pages_show_results_claims_and_what_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.translation("grouped").count("not measured") == len(EXPERIMENTS["grouped"])
    assert "not measured" in pages.translation_curves("grouped")
    assert "not measured" in pages.group_loss()
    row = {"maps": "value", "weight": 0.05, "ght": 3.5, "ght_ps": 3.0004}
    losses = {"rows": [row], "machine": {"cpu": "C"}, "command": "python"}
    _common.write_json(tmp_path / "training" / "group-loss.json", losses)
    assert "| value | 0.05 | 3.500 | 3.000 |" in pages.group_loss()
    for seed, score in enumerate((30.0, 31.0)):
        run = {
            "variant": "vanilla", "configuration": asdict(VARIANTS["vanilla"]), "seed": seed,
            "bleu": score, "parameters": 1e6, "macs": 2e6,
            "steps_per_cpu_s": 3.0, "settings": TINY.to_json(), "pairs": 40,
            "curve": [{"step": step, "train_loss": 3.0, "val_loss": 2.0} for step in (2, 4)],
            "machine": {"cpu": "C", "torch": "2", "threads": 1, "shared": True},
        }  # fmt: skip
        _common.write_json(tmp_path / "training" / f"translation-vanilla-{seed}.json", run)
    for experiment, name in (("grouped", "vanilla"), ("collaborative", "concatenated")):
        row = next(r for r in pages.translation(experiment).splitlines() if f"| {name} |" in r)
        assert EXPERIMENTS[experiment][name] in row and "30.5 (30.0 to 31.0)" in row
        assert (
            pages.translation(experiment).count("not measured") == len(EXPERIMENTS[experiment]) - 1
        )
        assert "<svg" in pages.translation_curves(experiment)
    assert "shared with other processes" in pages.translation_source()
    path = tmp_path / "training" / "translation-ght-0.json"
    other = {**asdict(VARIANTS["ght"]), "group_weight": 0.5}
    _common.write_json(path, {**run, "variant": "ght", "configuration": other})
    with pytest.raises(ValueError, match="has changed"):
        pages.translation("grouped")
    _common.write_json(path, {**run, "variant": "ght", "settings": {**TINY.to_json(), "steps": 5}})
    with pytest.raises(ValueError, match="different settings"):
        pages.translation("grouped")
