"""Example inputs: valid for the graph and reproducible by seed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.example_inputs import example_inputs, id_bound
from graph_passes.analysis.workload import Workload
from graph_passes.errors import InvalidArgument, InvalidModel
from tests.errors import raises


def model(inputs: str, body: str = "y = Identity(w)", weights: str = "float[3,2] w") -> ir.Model:
    """A graph with these inputs, and a table ``w`` of 3 rows."""
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        g ({inputs}) => (float[a,b] y) <{weights} = {{1, 2, 3, 4, 5, 6}}> {{ {body} }}"""
    )


BERT = (
    "int64[batch,seq] input_ids, int64[batch,seq] attention_mask, int64[batch,seq] token_type_ids"
)


def test_example_inputs_of_encoder():
    inputs = example_inputs(model(BERT, "y = Gather(w, input_ids)"), Workload.of(4, 64))
    assert {name: array.shape for name, array in inputs.items()} == dict.fromkeys(inputs, (4, 64))
    assert list(inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    assert set(inputs["input_ids"].ravel()) == {0, 1, 2}
    assert inputs["attention_mask"].all() and not inputs["token_type_ids"].any()
    assert all(array.dtype == np.int64 for array in inputs.values())


def test_example_inputs_are_reproducible_by_seed():
    graph = model(BERT)
    one, same, other = (example_inputs(graph, Workload.of(2, 32), seed) for seed in (1, 1, 2))
    assert (one["input_ids"] == same["input_ids"]).all()
    assert (one["input_ids"] != other["input_ids"]).any()


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        ("y = Gather<axis = 0>(w, ids)", 3),
        ("c = Cast<to = 6>(ids) f = Flatten(c) y = Gather(w, f)", 3),
        ("h = Cast<to = 10>(w) y = Gather(h, ids)", 3),
        ("y = com.microsoft.EmbedLayerNormalization(ids, , w, w, , w, w)", 3),
        ("y = Gather<axis = 1>(w, ids)", None),  # columns, not rows
        ("y = Gather(ids, w)", None),  # the ids are the table
        ("c = Add(ids, ids) y = Gather(w, c)", None),  # no longer the ids that came in
    ],
)
def test_id_bound_is_the_size_of_the_table_or_none(body: str, bound: int | None):
    assert id_bound(model("int64[b,s] ids", body).graph.inputs[0]) == bound


def test_id_bound_of_two_tables_is_the_smaller():
    graph = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (int64[b,s] ids) => (float[b,s] y)
        <float[5] large = {1, 2, 3, 4, 5}, float[2] small = {1, 2}>
        { l = Gather(large, ids) s = Gather(small, ids) y = Add(l, s) }"""
    )
    assert id_bound(graph.graph.inputs[0]) == 2


def test_example_inputs_types_and_fixed_axes():
    inputs = example_inputs(
        model("float16[n,3,8,8] pixels, bool[n,1,s,t] keep, int32[s] lengths, float scale"),
        Workload.of(2, 5),
    )
    assert inputs["pixels"].shape == (2, 3, 8, 8) and inputs["pixels"].dtype == np.float16
    assert inputs["keep"].shape == (2, 1, 5, 5) and inputs["keep"].all()
    assert inputs["lengths"].dtype == np.int32
    assert inputs["scale"].shape == ()


def test_example_inputs_omit_initializers():
    graph = model("int64[b,s] ids, float[3,2] w")
    assert list(example_inputs(graph, Workload.of(1, 2))) == ["ids"]


def test_masks_of_pytorch_mark_the_padding():
    graph = model("int64[b,s] ids, bool[b,s] src_key_padding_mask")
    assert not example_inputs(graph, Workload.of(4, 9))["src_key_padding_mask"].any()
    mask = example_inputs(graph, Workload.of(16, 33), padded=True)["src_key_padding_mask"]
    assert not mask[:, :17].any() and mask[1:, -1].any() and not mask[0].any()


def test_example_inputs_padded_masks():
    mask = example_inputs(model(BERT), Workload.of(16, 33), padded=True)["attention_mask"]
    lengths = mask.sum(axis=1)
    assert lengths[0] == 33 and lengths.min() >= 17 and lengths.min() < 33
    assert (np.diff(mask, axis=1) <= 0).all()


def test_example_inputs_positions_count_up_within_their_table():
    graph = model("int64[b,s] position_ids", "y = Gather(w, position_ids)")
    assert example_inputs(graph, Workload.of(2, 3))["position_ids"].tolist() == [[0, 1, 2]] * 2
    with raises(InvalidArgument, "inputs.too_long", 4, 3):
        example_inputs(graph, Workload.of(1, 4))


@pytest.mark.parametrize(
    ("inputs", "size", "code", "value"),
    [
        ("int64[1,s] ids", (2, 7), "fixed_axis", "`batch` is 2"),
        ("int64[b,128] ids", (2, 7), "fixed_axis", "`sequence` is 7"),
        *((BERT, size, "range", "") for size in ((0, 1), (1, 0), (-1, 8))),
    ],
)
def test_example_inputs_of_impossible_shapes_are_refused(
    inputs: str, size: tuple[int, int], code: str, value: str
):
    with raises(InvalidArgument, f"inputs.{code}", value):
        example_inputs(model(inputs), Workload.of(*size))


def test_example_inputs_strings_and_unknown_shapes_are_refused():
    with raises(InvalidModel, "inputs.type", "'words'", "STRING"):
        example_inputs(model("string[b,s] words"), Workload.of(1, 1))
    graph = model("int64[b,s] ids")
    graph.graph.inputs[0].dtype = ir.DataType.UNDEFINED
    with raises(InvalidModel, "inputs.type", "'ids'", "UNDEFINED"):
        example_inputs(graph, Workload.of(1, 1))
    graph.graph.inputs[0].shape = None
    with raises(InvalidModel, "inputs.no_shape", "'ids'"):
        example_inputs(graph, Workload.of(1, 1))
