"""Train a small Llama-like language model and export it: a decoder for benchmarks.

    python -m benchmarks.training.language_model --text TEXT -o FOLDER [--epochs E] [--threads T]

Trains a Llama with random weights (rotary positions, grouped keys, gated feed-forwards) on TEXT,
one paragraph a line. Every fourth paragraph is left out: they give the perplexity, and benchmarks
calibrate and measure on them. FOLDER is written by ``attnserve.export``.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnserve
from benchmarks._common import description
from benchmarks.classifier import rate
from benchmarks.training.data import BOS, EOS, PAD, train_tokenizer

VOCABULARY = 4000
TOKENS, ROWS = 128, 8
"""Tokens of a row, rows of a batch."""

RATE = 1e-3

SIZES = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--text", type=Path, required=True, help="one paragraph a line")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the artifact")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 is its default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        perplexity = train(options.text, Path(name), options.epochs, options.seed)
        attnserve.export(name, options.output, task="text-generation")
    print(f"perplexity of the paragraphs that were left out: {perplexity:.1f}")
    return 0


def learned_and_unseen(text: Path) -> tuple[list[str], list[str]]:
    """Return the paragraphs to train on, and those that are left out.

    Raises:
        SystemExit: There are less than four paragraphs.
    """
    lines = (line.strip() for line in text.read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if line and not line.startswith("=")]
    if len(found) < 4:
        raise SystemExit(f"{text} has {len(found)} paragraphs: expected at least 4, one a line")
    return [line for i, line in enumerate(found) if i % 4 != 3], found[3::4]


def train(text: Path, folder: Path, epochs: int, seed: int) -> float:
    """Train the model, save it with its tokenizer, and return the perplexity per token."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    known, unseen = learned_and_unseen(text)
    tokenizer = train_tokenizer(known, VOCABULARY)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        **SIZES,
    )  # fmt: skip
    network = LlamaForCausalLM(config)
    rows, held_out = (_rows(tokenizer.encode_batch(part)) for part in (known, unseen))
    steps = epochs * math.ceil(len(rows) / ROWS)
    optimizer = torch.optim.AdamW(network.parameters(), RATE, (0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    for epoch in range(epochs):
        network.train()
        for batch in rows[torch.randperm(len(rows))].split(ROWS):
            _loss(network, batch).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        network.eval()
        with torch.no_grad():
            losses = [_loss(network, batch) * len(batch) for batch in held_out.split(ROWS)]
        perplexity = math.exp(sum(losses).item() / len(held_out))
        print(f"epoch {epoch + 1} of {epochs}: perplexity {perplexity:.1f}", flush=True)
    network.save_pretrained(folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return perplexity


def _rows(encodings: Sequence[Any]) -> Tensor:
    """Rows (N, TOKENS) of the paragraphs, one after the other, without the last tokens."""
    ids = torch.tensor([i for encoding in encodings for i in (BOS, *encoding.ids)])
    count = max(len(ids) // TOKENS, 1)
    return ids[: count * TOKENS].reshape(count, -1)


def _loss(network: Any, batch: Tensor) -> Tensor:
    return network(input_ids=batch, labels=batch, use_cache=False).loss


if __name__ == "__main__":
    sys.exit(main())
