"""The text tasks of a model, by its outputs and configuration, and the answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from attnserve.models.artifact import Artifact
from attnserve.models.embeddings import VECTOR_OUTPUTS, output_name, pool
from attnserve.serving.activations import scores_of
from attnserve.serving.signature import Axes, Signature
from graph_passes.errors import InvalidData, Refusal

__all__ = ["TextTask", "task_vectors", "tasks_of", "text_output"]

TextTask = Literal["embed", "classify", "rerank", "tokens", "sparse"]

HIDDEN_STATES = ("last_hidden_state", "token_embeddings")
"""Names of the output with one vector per token, as exporters write them."""


def text_output(task: TextTask, names: Sequence[str], artifact: Artifact) -> str:
    """The name of the output that ``task`` uses, among the ``names`` of all outputs.

    Raises:
        InvalidArgument: The artifact names an output that the model does not have.
    """
    if task == "tokens" and (hidden := [name for name in HIDDEN_STATES if name in names]):
        return hidden[0]
    return output_name(names, artifact.output, scores=task not in ("embed", "tokens"))


def task_vectors(
    task: TextTask, output: np.ndarray, mask: np.ndarray | None, artifact: Artifact
) -> np.ndarray:  # B D, or B S D for "tokens"
    """Compute the answer to a task for each text of a batch.

    Args:
        task: "embed" pools token vectors (not normalized); "tokens" gives all token vectors,
            including padding; "classify" and "rerank" give logits; "sparse" gives the weight of
            each token of the vocabulary: the largest log(1 + relu(logit)) over the tokens of the
            text (Formal et al. 2021, SPLADE v2).
        output: The output of ``text_output`` for the batch.
        mask: The real tokens; None if there is no padding.

    Raises:
        InvalidArgument, InvalidData: The output has no embeddings or no classes.
    """
    if mask is None:
        mask = np.ones(output.shape[:2], dtype=np.bool_)
    if task == "embed":
        return pool(output, mask, artifact.pooling, False, artifact.dimensions)
    if task == "classify":
        return scores_of(output, "identity")
    if task == "tokens":
        return output.astype(np.float32, copy=False)
    if task == "sparse":
        largest = np.where(mask[..., None] != 0, output, 0).max(axis=1)
        return np.log1p(np.maximum(largest.astype(np.float32), 0))
    if output.ndim == 2 and output.shape[1] == 1:
        return output.astype(np.float64)
    raise InvalidData(f"the output has the shape {list(output.shape)}: expected [batch, 1]")


def tasks_of(signature: Signature, artifact: Artifact) -> Mapping[TextTask, Refusal | None]:
    """For each task, the reason why a model cannot do it; None if it can.

    Several tasks are possible for one model: a classifier of one class is also a reranker.

    Raises:
        InvalidArgument: The artifact names an output that the model does not have.
        InvalidModel: The file config.json is not valid.
    """
    name, names = signature.model, signature.output_names
    used = {task: text_output(task, names, artifact) for task in get_args(TextTask)}
    axes = {task: signature.axes_of(output) for task, output in used.items()}
    scores, vectors = axes["classify"], axes["embed"]

    classifies = _classifies(artifact, used["classify"], scores)
    reranks = classifies and (scores[1] == 1 or not isinstance(scores[1], int))
    is_masked = artifact.record.task == "fill-mask" or artifact.settings.is_for("MaskedLM")
    is_sparse = is_masked and len(scores) == 3
    has_classes = classifies and used["embed"] == used["classify"]

    instead = fix = ""  # what the output has in place of embeddings, and its use
    if _has_scores(used["embed"], vectors, signature, artifact, has_classes=has_classes):
        instead, fix = "scores of classes", "use /predict"
        if reranks:
            instead, fix = "scores of pairs", "use /rerank, or /predict for single texts"
    elif is_sparse:
        instead, fix = "sparse vectors", "use /embed_sparse"
    elif len(vectors) == 3 and (
        used["embed"].endswith("logits") or _is_vocabulary(artifact, vectors[2])
    ):
        instead, fix = "logits of tokens", f"send token ids to /v2/models/{name}/infer"

    refusals: dict[TextTask, Refusal | None] = dict.fromkeys(get_args(TextTask))
    if instead:
        refusals["embed"] = Refusal(
            "no_embeddings", f"{name} has no embeddings, but {instead}", fix
        )
    if not classifies:
        refusals["classify"] = Refusal(
            "no_classes",
            f"{name} has no classes: no output 'logits' of shape [batch, classes]",
            "use /embed for vectors, or name its scores in attnserve.json (`output`, and"
            " `activation`: identity for probabilities)",
        )
    if not reranks:
        refusals["rerank"] = Refusal(
            "no_reranker",
            f"{name} is not a reranker: it has no output 'logits' of shape [batch, 1]",
            "export a reranker with the task rerank",
        )
    if instead or len(axes["tokens"]) != 3:
        refusals["tokens"] = Refusal(
            "no_tokens", f"{name} has no vectors of tokens: its graph pools them", "use /embed"
        )
    if not is_sparse:
        refusals["sparse"] = Refusal(
            "no_sparse",
            f"{name} is not a SPLADE model: no output has the logits of a masked language model",
            "use /embed, or export a SPLADE model with the task fill-mask",
        )
    return refusals


def _has_scores(
    output: str, axes: Axes, signature: Signature, artifact: Artifact, *, has_classes: bool
) -> bool:
    """Whether an output has scores, [batch, classes], in place of embeddings.

    Args:
        has_classes: Whether it is the output of a classifier. Its axis of classes must then have a
            fixed size, or the record must name the output.
    """
    if len(axes) != 2 or axes[1] in signature.length_axes:
        return False
    is_fixed = isinstance(axes[1], int)
    if has_classes and artifact.output is not None:
        return True
    return output == "logits" or (is_fixed and (has_classes or output.endswith("logits")))


def _is_vocabulary(artifact: Artifact, axis: int | str | None) -> bool:
    """Whether an axis has the size of the vocabulary of a language model."""
    settings = artifact.settings
    is_language_model = settings.is_for("LM") or settings.is_for("LMHeadModel")
    return axis is not None and axis == artifact.config.get("vocab_size") and is_language_model


def _classifies(artifact: Artifact, output: str, axes: Axes) -> bool:
    """Whether a model is a classifier: by the name of the output, or by names of classes.

    An output that the record names must also have an activation there, or a name for each class.
    """
    if len(axes) != 2:
        return False
    if output == "logits":
        return True
    classes, labels = axes[1], artifact.labels
    has_all_labels = len(labels) == classes
    if artifact.output is not None:
        return artifact.activation is not None or has_all_labels
    if not labels or output in VECTOR_OUTPUTS:
        return False
    return has_all_labels or not isinstance(classes, int)
