"""Annotated array shapes, checked at run time in these tests only.

jaxtyping is imported for type checkers alone, so annotations are resolved here and a copy of each
function is checked.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graph_passes.blocks import AttentionBlock
from graph_passes.factorize.cp import collaborative_factors
from graph_passes.factorize.moments import TokenMoments
from graph_passes.passes.collaborate import factor
from graph_passes.reference import softmax
from tests.graph_passes.graphs import D, H, K, attention, only

jaxtyping = pytest.importorskip("jaxtyping", reason="pip install 'attnserve[dev]'")
beartype = pytest.importorskip("beartype", reason="pip install 'attnserve[dev]'")

R = 5


def hints_of(annotated: Any, module: str) -> dict[str, Any]:
    names = {**vars(importlib.import_module(module)), **vars(jaxtyping), "CPTensor": Any}
    return typing.get_type_hints(annotated, globalns=names)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that checks the annotated shapes of arguments and result."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = hints_of(function, function.__module__)
    return jaxtyping.jaxtyped(typechecker=beartype.beartype)(copy)


def assert_fields_fit(instance: Any) -> None:
    """All arrays of a dataclass have their annotated shapes; equal letters are equal lengths."""
    hints = hints_of(type(instance), type(instance).__module__)
    with jaxtyping.jaxtyped("context"):
        for field in dataclasses.fields(instance):
            hint, value = hints[field.name], getattr(instance, field.name)
            if isinstance(value, np.ndarray):
                assert isinstance(value, hint), f"{field.name}: {value.shape}"


@pytest.fixture(scope="module")
def block() -> AttentionBlock:
    return only(attention())


def moments() -> TokenMoments:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, D))
    return TokenMoments(x.mean(0), x.T @ x / 40, x.T @ x / 40, np.ones(H))


def test_softmax_annotated_shapes_hold() -> None:
    assert checked(softmax)(np.zeros((2, 3, 5))).shape == (2, 3, 5)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(softmax)(np.zeros((2, 3), dtype=np.int64))


def test_collaborative_factors_annotated_shapes_hold(block: AttentionBlock) -> None:
    queries, keys = block.q.heads(), block.k.heads()
    factors = checked(collaborative_factors)(
        queries, keys, R, query_bias=block.q.offset, moments=moments()
    )
    assert_fields_fit(factors)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(collaborative_factors)(queries, keys[:-1], R)


def test_dataclass_fields_have_annotated_shapes(block: AttentionBlock) -> None:
    assert block.output is not None
    for instance in (block.q, block.k, block.v, block.output, moments(), factor(block, R)):
        assert_fields_fit(instance)


def test_dataclass_field_of_wrong_shape_fails(block: AttentionBlock) -> None:
    with pytest.raises(AssertionError, match=rf"gain: \({H}, {K + 1}\)"):
        assert_fields_fit(dataclasses.replace(block.q, gain=np.ones((H, K + 1))))


@pytest.mark.parametrize("name", ["matrix", "heads"])
def test_projection_methods_annotated_shapes_hold(block: AttentionBlock, name: str) -> None:
    for projection in (block.q, block.k, block.v):
        checked(getattr(type(projection), name))(projection)
