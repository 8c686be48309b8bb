"""A plan in a file: what is done to each layer, written as JSON and read back with suspicion."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from attnserve.models.precision import Precision
from attnserve.planning.head_selection import (
    Masks,
    MutableEdges,
    handed_on,
    layer_name,
    read_edges,
    read_masks,
)
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument
from graph_passes.passes import refusals as rewrites
from graph_passes.passes.fuse_attention import Form

__all__ = ["MAKE_ONE", "Plan", "from_hex", "read_plan", "to_hex"]


MAKE_ONE = "make one with `attnserve plan MODEL --calib FILE --keep X -o plan.json`"


@dataclass(frozen=True)
class Plan:
    """What is done, by layer, in the order in which it is done.

    Attributes:
        skip: Layers whose attention is left out, and what stands for it.
        masks: 1 for each head that stays; layers of which all stay are not in it.
        edges: Heads that take the probabilities of others, in the numbers of the original.
        ranks: R of layers that get collaborative heads.
        head_sizes: Of these, the layers with sparse mixing, and how many dimensions a head reads.
        neurons: By feed-forward, 1 for each neuron that stays.
        forms: Attentions that are written as one operator of ONNX Runtime, and as which.
        gelu: Feed-forwards whose activation is written as one.
        sums: Whether residuals are written as ``SumResiduals`` does.
        precision: Of the weights, after all rewrites.
        warnings: What was asked for and is not done, and why.
    """

    skip: dict[str, Literal["affine", "constant"]]
    masks: Masks
    edges: MutableEdges
    ranks: dict[str, int]
    head_sizes: dict[str, int]
    neurons: Masks = field(default_factory=dict[str, list[int]])
    forms: Mapping[str, Form] = field(default_factory=dict[str, Form])
    gelu: Sequence[str] = field(default_factory=list[str])
    sums: bool = False
    precision: Precision = "float32"
    warnings: list[str] = field(default_factory=list[str])

    @property
    def changed(self) -> list[str]:
        """Every attention that something is done to."""
        return list(dict.fromkeys([*self.skip, *self.masks, *self.edges, *self.ranks]))

    def to_json(self) -> dict[str, Any]:
        edges = {
            name: {str(head): list(source) for head, source in heads.items()}
            for name, heads in self.edges.items()
        }
        return {"skip": dict(self.skip), "prune_heads": self.masks, "reuse": edges,
                "collab_dk": self.ranks, "head_dk": self.head_sizes,
                "prune_neurons": {name: to_hex(mask) for name, mask in self.neurons.items()},
                "fuse": dict(self.forms), "fuse_gelu": list(self.gelu), "sum_residuals": self.sums,
                "precision": self.precision}  # fmt: skip


def read_plan(
    content: Mapping[str, Any],
    blocks: Sequence[AttentionBlock],
    feed_forwards: Mapping[str, int] | None = None,
) -> Plan:
    """What ``Plan.to_json`` wrote, checked against the model: whoever wrote it may be mistaken.

    Args:
        blocks: Of the model, in order of execution.
        feed_forwards: How many neurons each has, by name; None leaves names and numbers unchecked.

    Raises:
        InvalidArgument: It is no such object, or does not fit the model.
    """
    if odd := [str(key) for key in content if key not in PARTS]:
        raise InvalidArgument(f"--plan: {odd[0][:100]!r} is none of {', '.join(PARTS)}", MAKE_ONE)
    reader = _PlanReader(content, {block.name: block for block in blocks}, blocks, feed_forwards)
    skips, masks, edges = reader.skips(), reader.masks(), reader.edges()
    reader.check_left_out(skips, masks, edges)
    ranks = reader.ranks(skips, masks, edges)
    head_sizes = reader.head_sizes(ranks)
    return Plan(
        skips, masks, edges, ranks, head_sizes,
        reader.neurons(),
        forms=reader.forms(skips, edges, ranks.keys() - head_sizes.keys()),
        gelu=reader.gelu(),
        sums=_one_of("sum_residuals", content.get("sum_residuals", False), (False, True)),
        precision=_one_of("precision", content.get("precision", "float32"), get_args(Precision)),
    )  # fmt: skip


PARTS = ("skip", "prune_heads", "reuse", "collab_dk", "head_dk", "prune_neurons", "fuse",
         "fuse_gelu", "sum_residuals", "precision")  # fmt: skip
"""What ``Plan.to_json`` writes."""


@dataclass(frozen=True, eq=False)
class _PlanReader:
    """Checks a plan part by part."""

    content: Mapping[str, Any]
    by_name: Mapping[str, AttentionBlock]
    blocks: Sequence[AttentionBlock]
    feed_forwards: Mapping[str, int] | None

    def skips(self) -> dict[str, Literal["affine", "constant"]]:
        found: dict[str, Literal["affine", "constant"]] = {}
        for name, kind in self._layers("skip").items():
            reason = rewrites.skip(self.by_name[name]) or self._handed_on(name)
            _require_none(reason, name, "skipped")
            found[name] = _one_of(f"skip of {name}", kind, ("affine", "constant"))
        return found

    def masks(self) -> Masks:
        given = self._layers("prune_heads")
        masks = read_masks(given, self.blocks, "--plan") if given else {}
        masks = {name: mask for name, mask in masks.items() if not all(mask)}
        for name, mask in masks.items():
            block = self.by_name[name]
            reason = rewrites.prune(block) or ("" if any(mask) else rewrites.skip(block))
            _require_none(reason or self._handed_on(name), name, "pruned")
        return masks

    def edges(self) -> MutableEdges:
        given = self._layers("reuse")
        edges = read_edges(given, self.blocks, "--plan") if given else {}
        for name, heads in edges.items():
            for source in dict.fromkeys(source for source, _ in heads.values()):
                reason = rewrites.reuse(self.by_name[name], [self.by_name[source]])
                reason = reason or self._handed_on(name)
                _require_none(reason, name, f"given the probabilities of {source}")
        return edges

    def check_left_out(self, skips: Mapping[str, str], masks: Masks, edges: MutableEdges) -> None:
        """Nothing else is done to a layer that is skipped, and no head that goes is reused."""
        for kind, layers in (("prune_heads", masks), ("reuse", edges)):
            _apart(kind, layers, skips)
        for name, heads in edges.items():
            for head, (source, theirs) in heads.items():
                for layer, number in ((name, head), (source, theirs)):
                    if layer in skips or not masks.get(layer, (1,) * (number + 1))[number]:
                        raise InvalidArgument(
                            f"--plan: the edge {name}[{head}] <- {source}[{theirs}] needs head "
                            f"{number} of {layer}, which is taken out",
                            MAKE_ONE,
                        )

    def ranks(self, skips: Mapping[str, str], masks: Masks, edges: MutableEdges) -> dict[str, int]:
        ranks = self._layers("collab_dk")
        _apart("collab_dk", ranks, skips)
        for name, rank in ranks.items():
            block = self.by_name[name]
            _require_none(rewrites.collaborate(block, caches=True), name, "factored")
            mask, taken = masks.get(name, [1] * block.num_heads), edges.get(name, {})
            own = sum(1 for head in block.own_heads.tolist() if mask[head] and head not in taken)
            if not own:
                raise InvalidArgument(
                    f"--plan: collab_dk names {name}, of whose own heads none is left", MAKE_ONE
                )
            held = f"{name}, which has {own} heads x {block.head_size} of its own"
            _within(f"collab_dk of {held}", rank, own * block.head_size)
        return ranks

    def head_sizes(self, ranks: Mapping[str, int]) -> dict[str, int]:
        sizes = self._layers("head_dk")
        for name, size in sizes.items():
            if name not in ranks:
                raise InvalidArgument(
                    f"--plan: head_dk names {name}, which collab_dk does not", MAKE_ONE
                )
            if self.by_name[name].k.past is not None:
                reason = "its cache holds what all heads share"
                _require_none(reason, name, "given sparse mixing")
            _within(f"head_dk of {name}", size, min(self.by_name[name].head_size, ranks[name]))
        return sizes

    def forms(
        self, skips: Mapping[str, str], edges: MutableEdges, dense: Collection[str]
    ) -> dict[str, Form]:
        """No operator reads the probabilities of another, returns its own or has all heads share
        all dimensions."""
        forms = self._layers("fuse")
        _apart("fuse", forms, skips)
        sources = {source for heads in edges.values() for source, _ in heads.values()}
        for kind, layers in (("reuse", {*edges, *sources}), ("collab_dk", dense)):
            both = next((name for name in forms if name in layers), None)
            if both is not None:
                raise InvalidArgument(
                    f"--plan: fuse and {kind} both name {both}, and no operator holds that",
                    MAKE_ONE,
                )
        return {n: _one_of(f"fuse of {n}", form, get_args(Form)) for n, form in forms.items()}

    def neurons(self) -> Masks:
        found: Masks = {}
        for name, text in self._object("prune_neurons").items():
            count = self._neurons_of("prune_neurons", name)
            label = f"--plan: prune_neurons of {name[:100]}"
            try:
                if not isinstance(text, str):
                    raise ValueError(f"{reprlib.repr(text)} is no mask")
                mask = from_hex(text)
            except ValueError as error:
                raise InvalidArgument(f"{label}: {error}", MAKE_ONE) from error
            if len(mask) != (count or len(mask)):
                raise InvalidArgument(
                    f"{label} is a mask of {len(mask)}, expected {count}: one a neuron", MAKE_ONE
                )
            if not any(mask):
                raise InvalidArgument(f"{label} leaves no neuron", MAKE_ONE)
            if not all(mask):
                found[name] = mask
        return found

    def gelu(self) -> list[str]:
        names: Any = self.content.get("fuse_gelu", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(
                f"--plan: fuse_gelu is {reprlib.repr(names)}, expected a list of names", MAKE_ONE
            )
        for name in names:
            self._neurons_of("fuse_gelu", name)
        return list(dict.fromkeys(names))

    def _neurons_of(self, kind: str, name: str) -> int | None:
        """How many a feed-forward has; None where nothing is known of any."""
        if self.feed_forwards is not None and name not in self.feed_forwards:
            raise InvalidArgument(
                f"--plan: {kind} names {name[:100]!r}, and no feed-forward has this name", MAKE_ONE
            )
        return None if self.feed_forwards is None else self.feed_forwards[name]

    def _object(self, kind: str) -> dict[str, Any]:
        given = self.content.get(kind, {})
        if not isinstance(given, Mapping):
            raise InvalidArgument(
                f"--plan: {kind} is {reprlib.repr(given)}, expected an object by layer", MAKE_ONE
            )
        entries: Mapping[Any, Any] = given
        return {str(key): value for key, value in entries.items()}

    def _layers(self, kind: str) -> dict[str, Any]:
        """What a part says of each layer, by its name whether it was given that or an index."""
        given = self._object(kind)
        if given and not self.by_name:
            raise InvalidArgument(
                f"--plan: {kind} names {next(iter(given))[:100]!r}, and the model has no attention",
                MAKE_ONE,
            )
        found: dict[str, Any] = {}
        for layer, value in given.items():
            name = layer_name(layer, list(self.by_name), "--plan")
            if name in found:
                raise InvalidArgument(f"--plan: {kind} names {name} twice", MAKE_ONE)
            found[name] = value
        return found

    def _handed_on(self, name: str) -> str:
        return handed_on(self.by_name[name], self.blocks)


def _require_none(reason: str, name: str, done: str) -> None:
    if reason:
        raise InvalidArgument(f"--plan: {name} cannot be {done}: {reason}", MAKE_ONE)


def _apart(kind: str, layers: Mapping[str, Any], skips: Mapping[str, str]) -> None:
    both = next((name for name in layers if name in skips), None)
    if both is not None:
        raise InvalidArgument(
            f"--plan: {kind} names {both}, which skip leaves out altogether", MAKE_ONE
        )


def _one_of(what: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(value, str | bool) or value not in allowed:
        raise InvalidArgument(
            f"--plan: {what} is {reprlib.repr(value)}, expected one of "
            + ", ".join(map(str, allowed)),
            MAKE_ONE,
        )
    return value


def _within(what: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidArgument(
            f"--plan: {what} is {reprlib.repr(value)}, expected 1 to {most}", MAKE_ONE
        )


def to_hex(mask: Sequence[int]) -> str:
    """A mask of many neurons as hexadecimal digits, four a digit, and their number: ``1536:ff0..``.

    The first neuron is the highest bit of the first digit.
    """
    digits = -(-len(mask) // 4)
    bits = "".join(str(int(bit)) for bit in mask).ljust(4 * digits, "0")
    return f"{len(mask)}:{int(bits or '0', 2):0{digits}x}"


def from_hex(text: str) -> list[int]:
    """The mask that ``to_hex`` wrote.

    Raises:
        ValueError: It wrote no such text.
    """
    parts = WRITTEN.fullmatch(text)
    size, digits = (int(parts[1]), parts[2]) if parts else (0, "")
    if not 0 < size <= 4 * len(digits) < size + 4:
        raise ValueError(f"{reprlib.repr(text)} is no mask")
    bits = f"{int(digits, 16):0{4 * len(digits)}b}"
    if "1" in bits[size:]:
        raise ValueError(f"{reprlib.repr(text)} has more bits than its {size}")
    return [int(bit) for bit in bits[:size]]


WRITTEN = re.compile(r"([1-9][0-9]{0,8}):([0-9a-f]+)")
"""No sign, space or underscore, which ``int`` reads too."""
