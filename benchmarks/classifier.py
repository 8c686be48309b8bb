"""Train a small sentiment classifier and export it: an artifact for benchmarks of class logits.

    python -m benchmarks.classifier --train SST2_TRAIN.tsv --dev SST2_DEV.tsv -o FOLDER

Fine-tunes all-MiniLM-L6-v2 (from the [demo] extra) on sentences with two classes, columns label and
sentence, with AdamW and a linear schedule. With ``--scratch``, a small ModernBERT with random
weights (rotary positions, gated feed-forwards, local and global layers) and the same vocabulary is
trained instead. One epoch of 6,920 sentences takes some minutes on two cores. The network stays in
a temporary folder; FOLDER is written by ``attnserve.export``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import attnserve
from benchmarks._common import classifier_accuracy, description, labeled_sentences, minilm

BATCH = 32
MAX_TOKENS = 64
RATE = 1e-4
WARM_UP = 0.1

SCRATCH = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "max_position_embeddings": 512, "local_attention": 32, "global_attn_every_n_layers": 3,
    "classifier_pooling": "mean",
}  # fmt: skip
"""The ModernBERT of ``--scratch``. Its local layers see 16 tokens on each side."""

SPECIAL = ("pad", "cls", "sep")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--train", type=Path, required=True, help="label, sentence")
    parser.add_argument("--dev", type=Path, required=True, help="label, sentence")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the artifact")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=RATE, help="the highest learning rate")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 is its default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", default=None, help="the encoder; default: all-MiniLM-L6-v2")
    parser.add_argument("--scratch", action="store_true", help="train a ModernBERT from nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        train(options, Path(name))
        print(f"trained in {time.perf_counter() - start:.0f} s", flush=True)
        attnserve.export(name, options.output, task="sequence-classification")
    print(f"accuracy on {options.dev.name}: {classifier_accuracy(options.output, options.dev):.2%}")
    return 0


def train(options: argparse.Namespace, folder: Path) -> None:
    """Fine-tune the encoder and save it with its tokenizer."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        ModernBertConfig,
        ModernBertForSequenceClassification,
    )

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    source = options.source or minilm()
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    network: Any
    if options.scratch:
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}
        config = ModernBertConfig(vocab_size=len(tokenizer), num_labels=2, **ids, **SCRATCH)
        network = ModernBertForSequenceClassification(config)
    else:
        network = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2)
    texts, labels = labeled_sentences(options.train)
    encoded = tokenizer(texts, truncation=True, max_length=MAX_TOKENS)
    fine_tune(network, tokenizer, encoded, torch.tensor(labels), options)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fine_tune(
    network: Any, tokenizer: Any, encoded: Any, labels: Any, options: argparse.Namespace
) -> None:
    """Train a network with AdamW and the loss that its configuration names.

    Args:
        encoded: The tokens of each row, as the tokenizer returns them.
        labels: A tensor with the label of each row.
        options: ``epochs``, the highest learning ``rate``, and ``seed``.
    """
    import torch

    groups = [
        group
        for epoch in range(options.epochs)
        for group in batches([len(ids) for ids in encoded["input_ids"]], options.seed + epoch)
    ]
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate(i, len(groups)))
    network.train()
    for step, group in enumerate(groups):
        rows = {name: [values[i] for i in group] for name, values in encoded.items()}
        loss = network(**tokenizer.pad(rows, return_tensors="pt"), labels=labels[group]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} of {len(groups)}, loss {loss.item():.3f}", flush=True)


def batches(lengths: list[int], seed: int) -> list[list[int]]:
    """Return the rows of each batch, of nearly equal lengths, in random order."""
    random = np.random.default_rng(seed)
    order = np.argsort(np.asarray(lengths) + random.uniform(0, 4, len(lengths)))
    groups = np.array_split(order, max(len(order) // BATCH, 1))
    return [groups[i].tolist() for i in random.permutation(len(groups))]


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: it rises linearly, and then falls to zero."""
    warm = max(WARM_UP * steps, 1)
    return min((step + 1) / warm, (steps - step) / max(steps - warm, 1))


if __name__ == "__main__":
    sys.exit(main())
