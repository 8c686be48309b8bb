"""Write into an ONNX file how it was made: ``metadata_props`` of the model."""

from __future__ import annotations

import onnx_ir as ir

from attnserve.models.lineage import LineageEntry
from attnserve.versions import package_versions

__all__ = ["state_provenance"]

PREFIX = "attnserve."


def state_provenance(
    model: ir.Model, *, parent: str | None, entry: LineageEntry | None = None
) -> None:
    """Write version, parent and plan into the metadata of a model, in place of earlier entries.

    Nothing reads them: loading, fusion and the checksum of weights do not depend on them.

    Args:
        parent: SHA-256 of the file that the model was made from; None if unknown.
        entry: Its rewrite, with the plan; None for an export.
    """
    stated = {
        "version": package_versions(["attnserve"]).get("attnserve"),
        "parent_sha256": parent,
        "rewrite": entry and entry.rewrite,
        "plan": entry and entry.plan_id,
    }
    for key, value in stated.items():
        model.metadata_props.pop(PREFIX + key, None)
        if value is not None:
            model.metadata_props[PREFIX + key] = value
