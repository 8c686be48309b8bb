"""Requests for a stack of layers, with calibration data."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.checks.certify import MatchReport, read_attention
from attnserve.context import ONE_THREAD, RunContext
from attnserve.data.datasets import Dataset
from attnserve.models.lineage import Calibration
from attnserve.options import Rewrites
from attnserve.planning.plans.plan import Plan
from attnserve.planning.request.rewrites import PlannedRequest, plan_request
from attnserve.runtime.interface import Batch
from tests.graph_passes.graphs import D, layers
from tests.jobs import job_of

L = 4

NAMES = [f"attention_{layer}" for layer in range(L)]


def batches(seed: int, rows: int = 6) -> list[Batch]:
    random = np.random.default_rng(seed)
    return [
        {
            "x": random.standard_normal((rows, length, D)).astype(np.float32),
            "mask": np.zeros((rows, 1, 1, length), np.float32),
        }
        for length in (4, 7)
    ]


@cache
def data() -> Dataset:
    return Dataset(batches(0), batches(1), [batches(1)], 7, Calibration(fit_tokens=66))


@cache
def stack() -> tuple[ir.Model, MatchReport]:
    """L layers, as a plan reads them; planning changes nothing."""
    model = layers(L)
    return model, read_attention(model)


def request_of(
    *, model: ir.Model | None = None, calibrated: bool = True, dataset: Dataset | None = None,
    **request: Any,
) -> PlannedRequest:  # fmt: skip
    job = job_of(
        stack()[0] if model is None else model,
        data=dataset or (data() if calibrated else None),
        context=RunContext(ONE_THREAD),
    )
    return plan_request(Rewrites(**request), job)


def planned(**request: Any) -> Plan:
    return request_of(**request).plan
