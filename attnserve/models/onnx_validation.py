"""Validate the message of an untrusted ONNX file, and inline its local functions.

Weights must match their shapes and types, and external data must be inside the model's folder.
Operators of ONNX must have the attributes and the numbers of inputs of their definition, as ONNX
Runtime requires. Other modules rely on this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx
import onnx.inliner
import onnx_ir as ir
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from attnserve.paths import belongs_to
from graph_passes.errors import InvalidModel

__all__ = ["external_file", "external_locations", "validated"]

MAX_INLINED_NODES, MAX_INLINED_BYTES = 50_000, 1 << 29
"""Largest size of a model with inlined functions. Calls of 16 nested functions can inline to more
nodes than fit into memory."""

MAX_NESTED_FUNCTIONS = 64
"""Maximum depth of calls between local functions."""

MAX_OPSET = 1 << 31

REQUIRED = onnx.defs.OpSchema.FormalParameterOption.Single

MAX_INPUT, MAX_VALUE = 1 << 28, 1 << 31
"""Maximum number of elements of an input, and of a value between operators."""

TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
COMPLEX = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)


def validated(path: Path, proto: onnx.ModelProto) -> onnx.ModelProto:
    """The message with inlined functions, after all checks.

    Raises:
        InvalidModel: The message is not a valid model.
    """
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise InvalidModel(
            f"{path}: not an ONNX model: it has no graph",
            "export it again",
            code="artifact.not_onnx",
        )
    if not proto.opset_import:
        raise InvalidModel(
            f"{path}: no opset is declared; the file may be truncated",
            "export it again",
            code="artifact.no_opset",
        )
    for imported in proto.opset_import:
        if not 0 < imported.version < MAX_OPSET:
            raise InvalidModel(
                f"{path}: the opset of domain {imported.domain!r} is {imported.version}",
                "the file is damaged: download or export it again",
                code="artifact.opset",
            )
    messages = [*_messages(proto)]
    if any(isinstance(name, bytes) for message in messages for name in _names(message)):
        raise InvalidModel(
            f"{path}: a name in the file is not UTF-8",
            "the file is damaged: download or export it again",
            code="artifact.malformed",
        )
    for value in proto.graph.input:
        _check_size(path, value, MAX_INPUT)
    for value in (*proto.graph.output, *proto.graph.value_info):
        _check_size(path, value, MAX_VALUE)
    for message in messages:
        if isinstance(message, onnx.TensorProto):
            _check_tensor(path, message)
    if proto.functions:
        proto = _inlined(path, proto)
    nodes = [node for node in _messages(proto.graph) if isinstance(node, onnx.NodeProto)]
    for entry in (*proto.opset_import, *nodes):
        if entry.domain == "ai.onnx":  # the long name of the default domain
            entry.domain = ""
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    for node in nodes:
        _check_node(path, node, opsets.get("", 1))
    return proto


def _check_size(path: Path, value: onnx.ValueInfoProto, most: int) -> None:
    """Refuse implausible declared shapes: a small file could otherwise request gigabytes."""
    axes = value.type.tensor_type.shape.dim
    size = math.prod(max(axis.dim_value, 1) for axis in axes)
    if size > most:
        raise InvalidModel(
            f"{path}: {value.name!r} is declared with {size} elements",
            "the file is damaged: download or export it again",
            code="artifact.declared_size",
        )


def _check_node(path: Path, node: onnx.NodeProto, opset: int) -> None:
    """Refuse a node of ONNX whose attributes or numbers of inputs and outputs are invalid."""
    if node.domain or not onnx.defs.has(node.op_type, opset, ""):
        return
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    faults = [
        f"the attribute {name!r} is missing"
        for name, attribute in schema.attributes.items()
        if attribute.required
        and all(node_attribute.name != name for node_attribute in node.attribute)
    ]
    for node_attribute in node.attribute:
        declared = schema.attributes.get(node_attribute.name)
        # The stubs of onnx do not declare the number of an AttrType.
        if declared is not None and node_attribute.type != declared.type.value:  # pyright: ignore[reportAttributeAccessIssue]
            faults.append(f"the attribute {node_attribute.name!r} has type {node_attribute.type}")
    if not schema.min_input <= len(node.input) <= schema.max_input:
        faults.append(f"it has {len(node.input)} inputs")
    faults += [
        f"the input {formal.name!r} is missing"
        for formal, name in zip(schema.inputs, node.input, strict=False)
        if formal.option == REQUIRED and not name
    ]
    if not schema.min_output <= len(node.output) <= schema.max_output:
        faults.append(f"it has {len(node.output)} outputs")
    if faults:
        raise InvalidModel(
            f"{path}: {node.op_type} {node.name!r} is not valid in opset {opset}: {faults[0]}",
            "check it with onnx.checker.check_model, or export it again",
            code="artifact.node",
        )


def _messages(message: Message) -> Iterator[Message]:
    """A message and all messages in it: graphs, bodies, nodes, tensors, functions and others."""
    yield message
    for name, is_repeated in _fields(type(message), FieldDescriptor.TYPE_MESSAGE):
        if is_repeated:
            inner = getattr(message, name)
        else:
            inner = [getattr(message, name)] if message.HasField(name) else []
        for each in inner:
            yield from _messages(each)


def _names(message: Message) -> Iterator[str | bytes]:
    """The names in a message itself; those that are not UTF-8 are bytes."""
    for name, is_repeated in _fields(type(message), FieldDescriptor.TYPE_STRING):
        value = getattr(message, name)
        yield from value if is_repeated else [value]


@functools.cache
def _fields(kind: type[Message], field_type: int) -> Sequence[tuple[str, bool]]:
    """(name, whether it is repeated) of the fields of a type, except texts for people.

    ``Message.ListFields`` would copy the weights.
    """
    return [
        (field.name, field.is_repeated)
        for field in kind.DESCRIPTOR.fields
        if field.type == field_type and field.name not in ("doc_string", "metadata_props")
    ]


def _inlined(path: Path, proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its local functions inlined.

    Raises:
        InvalidModel: The functions call each other in a cycle, are too large inlined, or have
            an opset that cannot be converted to that of the model.
    """
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    sizes: dict[tuple[str, str, str], tuple[int, int]] = {}
    open_calls: list[tuple[str, str, str]] = []

    def refuse(what: str) -> InvalidModel:
        return InvalidModel(
            f"{path}: its local functions {what}",
            "inline the functions when you export the model",
            code="artifact.functions",
        )

    def inlined_size(nodes: Iterable[onnx.NodeProto]) -> tuple[int, int]:
        """Number of nodes and of bytes."""
        count = size = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            node_size = (1, node.ByteSize())
            if key in functions:
                if key not in sizes:
                    if key in open_calls or len(open_calls) >= MAX_NESTED_FUNCTIONS:
                        raise refuse(f"are recursive, or nested over {MAX_NESTED_FUNCTIONS} deep")
                    open_calls.append(key)
                    sizes[key] = inlined_size(functions[key].node)
                    open_calls.pop()
                node_size = sizes[key]
            subgraphs = [a.g for a in node.attribute if a.HasField("g")]
            subgraphs += [graph for a in node.attribute for graph in a.graphs]
            bodies = [inlined_size(graph.node) for graph in subgraphs]
            count += node_size[0] + sum(body[0] for body in bodies)
            size += node_size[1] + sum(body[1] for body in bodies)
        return count, size

    count, size = inlined_size(proto.graph.node)
    if count > MAX_INLINED_NODES or size > MAX_INLINED_BYTES:
        raise refuse(
            f"hold {count} nodes and {size} bytes when inlined: expected at most"
            f" {MAX_INLINED_NODES} nodes and {MAX_INLINED_BYTES} bytes"
        )
    other_opset = "have another opset than the model and cannot be converted"
    try:
        inlined = onnx.inliner.inline_local_functions(proto, convert_version=True)
    except RuntimeError as error:  # no adapter for an operator, or an argument without a type
        raise refuse(other_opset) from error
    if any((f.domain, f.name, f.overload) in sizes for f in inlined.functions):  # a custom domain
        raise refuse(other_opset)
    del inlined.functions[:]  # nothing calls the others
    return inlined


def _check_tensor(path: Path, tensor: onnx.TensorProto) -> None:
    """Refuse a weight whose data does not match its shape and type."""
    subject = f"{path}: the weight {tensor.name!r}"
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError):  # strings have no bit width; other values are invalid
        if tensor.data_type == onnx.TensorProto.STRING:
            _check_typed(subject, tensor, 8)
            return
        raise InvalidModel(
            f"{subject} has no known data type", "export it again", code="artifact.weight_type"
        ) from None
    if min(tensor.dims, default=0) < 0:
        raise InvalidModel(
            f"{subject} has a negative size {list(tensor.dims)}",
            "export it again",
            code="artifact.weight_shape",
        )
    size = math.ceil(math.prod(tensor.dims) * bits / 8)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external(path, tensor, size)
        return
    length = len(tensor.raw_data) if tensor.HasField("raw_data") else None
    if length is None and any(len(getattr(tensor, name)) for name in TYPED_FIELDS):
        _check_typed(subject, tensor, bits)
        return
    if (length or 0) != size:
        raise InvalidModel(
            f"{subject} of shape {list(tensor.dims)} has {length or 0} bytes, expected {size}",
            "the file is damaged: download or export it again",
            code="artifact.weight_size",
        )


def _check_typed(subject: str, tensor: onnx.TensorProto, bits: int) -> None:
    """Refuse elements in the field of another type, or in another number than the shape has."""
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    size = math.prod(tensor.dims)
    # Two entries are one complex number; one entry is 8 bits of smaller types.
    expected_count = 2 * size if tensor.data_type in COMPLEX else math.ceil(size * min(bits, 8) / 8)
    counts = {name: len(getattr(tensor, name)) for name in (*TYPED_FIELDS, "string_data")}
    if counts[field] != expected_count or sum(counts.values()) != expected_count:
        contents = ", ".join(f"{count} in {name}" for name, count in counts.items() if count)
        raise InvalidModel(
            f"{subject} of shape {list(tensor.dims)} has {contents or 'no'} elements,"
            f" expected {expected_count} in {field}",
            "the file is damaged: download or export it again",
            code="artifact.weight_size",
        )


def external_file(path: Path, location: str) -> Path | None:
    """The file of external data at ``location`` of a model; None if it is outside of its folder.

    Links are followed, see ``belongs_to``.
    """
    relative = Path(location)
    if (
        not location
        or relative.is_absolute()
        or any(character in location for character in "\\:\0")
        or ".." in relative.parts
    ):
        return None
    file = path.parent / relative
    return file.resolve() if belongs_to(file, path) else None


def external_locations(proto: onnx.ModelProto) -> list[str]:
    """The locations of external data, without duplicates, relative to the folder of the model."""
    locations = (
        entry.value
        for tensor in _messages(proto)
        if isinstance(tensor, onnx.TensorProto)
        and tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    )
    return list(dict.fromkeys(locations))


def _check_external(path: Path, tensor: onnx.TensorProto, size: int) -> None:
    """Refuse external data outside the model's folder, or with a wrong size."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    subject = f"{path}: external data of {tensor.name!r}"
    data = external_file(path, location)
    if data is None:
        raise InvalidModel(
            f"{subject} is at {location!r}: expected a file inside the model's folder",
            "do not use this file: a model must not read files outside its folder",
            code="artifact.external_outside",
        )
    if not data.is_file():
        raise InvalidModel(
            f"{subject} is missing: {location}",
            f"put {location} into the model's folder",
            code="artifact.external_missing",
        )
    if data.stat().st_nlink > 1:  # onnx_ir refuses it
        raise InvalidModel(
            f"{subject} is in {location}, which has several hard links and may be a file from "
            "outside of the model's folder",
            f"replace {location} by a copy of it",
            code="artifact.external_hard_link",
        )
    try:
        offset = int(entries.get("offset", "0"))
        length = int(entries.get("length", size))
    except ValueError as error:
        raise InvalidModel(
            f"{subject} has an invalid offset or length",
            "export it again",
            code="artifact.external_offset",
        ) from error
    if offset < 0 or length != size:
        raise InvalidModel(
            f"{subject} has offset {offset} and {length} bytes, expected {size} bytes",
            "the model and its data file do not match: copy both again",
            code="artifact.external_offset",
        )
    if offset + length > data.stat().st_size:
        raise InvalidModel(
            f"{subject} ends at byte {offset + length}, but {location} has {data.stat().st_size}",
            "the data file is truncated: copy it again",
            code="artifact.external_truncated",
        )
