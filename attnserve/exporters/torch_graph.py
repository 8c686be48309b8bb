"""Trace a PyTorch network to an ONNX graph, and compare the outputs of both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.exporters.transformers_model import Task, quiet
from attnserve.literals import Exporter
from attnserve.models.onnx_files import load_model
from attnserve.runtime.interface import RunFailed
from attnserve.runtime.session import open_session
from graph_passes.errors import CheckFailed, InvalidModel

__all__ = ["PositionalModule", "compare", "positional_module", "random_feeds", "trace"]

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""The possible inputs of a graph; an input is used if the model and its tokenizer have it."""

TOLERANCE = 1e-3
"""Maximum difference from PyTorch, relative to the largest output; usually it is 1e-6."""

EXAMPLE = (2, 7)
"""Batch and sequence of the inputs that trace the model."""

CHECKED = ((3, 11), (1, 24))
"""Batch and sequence of the checks; different from ``EXAMPLE``, to detect constant sizes."""


@dataclass(frozen=True)
class PositionalModule:
    """A module of positional tensors that returns a tuple, in evaluation mode.

    Attributes:
        torch: The package.
        module: The module; its ``network`` is that of transformers.
        inputs: The names of the tensors, in their order.
        task: The names of the outputs, and whether they have an axis of tokens.
    """

    torch: Any
    module: Any
    inputs: tuple[str, ...]
    task: Task


def positional_module(
    torch: Any, network: Any, tokenizer: Any, task: Task, head: Any = None
) -> PositionalModule:
    """Wrap a network as a module of the inputs that it has and its tokenizer makes.

    Args:
        head: A module that computes the output from the hidden states; None for the fields
            ``task.outputs`` of the network's output.
    """
    accepted = inspect.signature(network.forward).parameters
    names = tuple(n for n in INPUTS if n in accepted and n in tokenizer.model_input_names)

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.head = head

        def forward(self, *values: Any) -> Any:
            inputs = dict(zip(names, values, strict=True))
            result = self.network(**inputs, return_dict=True)
            if self.head is not None:
                return (self.head(result.last_hidden_state, inputs["attention_mask"]),)
            return tuple(getattr(result, field) for field in task.outputs)

    # dynamo uses the mode of the outermost module and exports Dropout nodes in training mode.
    return PositionalModule(torch, Wrapper().eval(), names, task)


def random_feeds(
    wrapped: PositionalModule, tokenizer: Any, limit: int | None, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Random inputs that trace a module, then those that check the graph.

    With several rows, the last one has padding.

    Args:
        limit: The maximum number of tokens; None for no limit.
    """
    config, pad = wrapped.module.network.config, tokenizer.pad_token_id or 0
    for batch, sequence in (EXAMPLE, *CHECKED):
        sequence = min(sequence, limit or sequence)
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, config.vocab_size, (batch, sequence))
        ids[ids == pad] = (pad + 1) % config.vocab_size
        mask = np.ones_like(ids)
        if batch > 1:
            mask[-1, sequence - sequence // 3 :] = 0
        ids[mask == 0] = pad
        num_types = max(min(getattr(config, "type_vocab_size", 2) or 1, 2), 1)
        types = np.broadcast_to(np.arange(sequence) * num_types // sequence, ids.shape).copy()
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        yield {name: values[name] for name in wrapped.inputs}


@quiet()
def trace(
    wrapped: PositionalModule,
    example: Mapping[str, np.ndarray],
    exporter: Exporter,
    opset: int,
    limit: int | None,
    scratch: Path,
) -> ir.Model:
    """Run the exporter and return the graph, with dynamic axes "batch" and "sequence".

    Raises:
        InvalidModel: A trace would be wrong for long texts.
    """
    torch, task = wrapped.torch, wrapped.task
    values = tuple(torch.from_numpy(value) for value in example.values())
    options: dict[str, Any] = {
        "opset_version": opset,
        "input_names": list(example),
        "output_names": list(task.outputs),
    }
    if exporter == "dynamo":
        dims = {
            0: torch.export.Dim("batch", min=1, max=2**15),
            1: torch.export.Dim("sequence", min=2, max=limit or 2**17),
        }
        program = torch.onnx.export(
            wrapped.module,
            values,
            dynamo=True,
            verbose=False,
            dynamic_shapes=((dims,) * len(values),),
            **options,
        )
        for node in program.model.graph.all_nodes():
            # Stack traces contain paths and source lines of this machine.
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
        return program.model
    _check_frequencies(wrapped.module.network, limit)
    axes = {0: "batch", 1: "sequence"}
    dynamic = dict.fromkeys(example, axes)
    dynamic |= dict.fromkeys(task.outputs, axes if task.per_token else {0: "batch"})
    with torch.no_grad():
        torch.onnx.export(
            wrapped.module,
            values,
            scratch / "traced.onnx",
            dynamo=False,
            dynamic_axes=dynamic,
            **options,
        )
    return load_model(scratch / "traced.onnx")


def _check_frequencies(network: Any, limit: int | None) -> None:
    """Check that rotary frequencies are equal at all lengths, because a trace has one length.

    Raises:
        InvalidModel: Texts of at most ``limit`` tokens have other frequencies.
    """
    for module in network.modules():
        # A string, or in some networks one for each type of layer.
        if "dynamic" not in str(getattr(module, "rope_type", "")):
            continue
        positions = module.original_max_seq_len
        if limit is None or limit > positions:
            raise InvalidModel(
                f"rope_type dynamic changes the frequencies of texts above {positions} tokens",
                f"set max_seq_length in sentence_bert_config.json to at most {positions}",
                code="export.dynamic_rope",
            )


def compare(
    wrapped: PositionalModule, path: Path, feeds: Sequence[Mapping[str, np.ndarray]]
) -> tuple[float, float]:
    """Largest absolute and relative error of the graph against PyTorch, without padding.

    Raises:
        CheckFailed: The relative error is above ``TOLERANCE``, or a number is not finite.
    """
    torch = wrapped.torch
    session = open_session(path)
    absolute = relative = 0.0
    for feed in feeds:
        with torch.no_grad(), quiet():
            torch_outputs = wrapped.module(*(torch.from_numpy(value) for value in feed.values()))
        real: Any = slice(None)
        if wrapped.task.per_token and "attention_mask" in feed:
            real = feed["attention_mask"] != 0
        try:
            onnx_outputs = session.run(None, feed)
        except RunFailed as error:
            raise CheckFailed(
                f"ONNX Runtime fails on the exported graph at shape"
                f" {feed['input_ids'].shape}: {error.reason}",
                "nothing was written: try the other `exporter` or another `opset`",
                code="export.does_not_run",
            ) from error
        for expected_output, computed_output in zip(torch_outputs, onnx_outputs, strict=True):
            reference = expected_output.numpy()[real]
            with np.errstate(invalid="ignore"):
                difference = float(np.abs(computed_output[real] - reference).max())
            scale = float(np.abs(reference).max())
            if not difference <= TOLERANCE * scale:  # also true for NaN
                raise CheckFailed(
                    f"ONNX Runtime and PyTorch differ by {difference:.3g} at shape"
                    f" {feed['input_ids'].shape}: expected at most {TOLERANCE * scale:.3g}",
                    "nothing was written: try the other `exporter`, `attention` or `opset`",
                    code="export.differs",
                )
            absolute = max(absolute, difference)
            relative = max(relative, difference / scale if scale else 0.0)
    return absolute, relative
