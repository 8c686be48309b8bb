"""The interface of all passes.

A pass is one class in one file of this package. plan.json, reports, ``inspect`` and the
documentation use its name. An object of the class holds the parameters by block, as plan.json lists
them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, get_args

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from graph_passes.analyses import Analyses
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.blocks import AttentionBlock, BlockT, FeedForwardBlock
from graph_passes.emit.editing import redirect_shapes, remove_unused, share_constants
from graph_passes.errors import CannotRewrite, InvalidArgument, Refusal
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_inserted, pin_names
from graph_passes.passes.invariants import CacheShape, Interface, check_invariants, interface

__all__ = [
    "AttentionPass",
    "AttentionTargets",
    "BlockPass",
    "FeedForwardPass",
    "FeedForwardTargets",
    "MomentsOf",
    "NoParams",
    "RewritePass",
    "pin_all_names",
    "small_shapes",
]

Params = TypeVar("Params")

AttentionTargets = Sequence[tuple[AttentionBlock, Params]]
FeedForwardTargets = Sequence[tuple[FeedForwardBlock, Params]]
"""Blocks to rewrite with their parameters, in order of execution."""

MomentsOf = Callable[[Collection[str], bool], Mapping[str, TokenMoments]]
"""A function from names of blocks to their token moments, as far as known. With True, it first
refits the blocks that earlier passes changed."""


class NoParams(BaseModel):
    """The parameters of a pass that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RewritePass(ir.passes.InPlacePass):
    """The base class of all passes, which change a graph in place.

    A run has these stages, in this order. A subclass defines the stages that it needs.

    1. ``validate`` raises InvalidArgument if the parameters do not fit the model.
    2. ``prepare`` edits the graph so that the later stages can read it, e.g. decomposes operators.
    3. ``check`` raises CannotRewrite if the pass does not apply.
    4. ``rewrite_graph`` changes the graph.
    5. The invariants of ``invariants.py`` are checked, with ``expected_interface``.

    Attributes:
        name: Identifies the pass in plans, reports and options; empty for a pass outside of plans.
        lossy: Whether outputs change by more than rounding.
        order: Requests and searches apply passes in ascending order; a plan.json may have any
            order. Fusions of operators start at 100.
        targets: The parameters by block; empty for a pass of the whole graph.
    """

    name: ClassVar[str] = ""
    lossy: ClassVar[bool] = False
    order: ClassVar[int] = 90
    targets: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the definition of a pass.

        Raises:
            InvalidArgument: A named lossy pass has no blocks as targets: outputs are refitted by
                block.
        """
        super().__init_subclass__(**kwargs)
        if cls.name and cls.lossy and not issubclass(cls, BlockPass):
            raise InvalidArgument(
                f"{cls.__name__} is lossy and rewrites the whole graph: outputs are refitted by"
                " block",
                "extend AttentionPass or FeedForwardPass, or leave out its name",
                code="pass.lossy",
            )

    # ---- the run ---------------------------------------------------------------------------------

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        # Not in ``requires`` and ``ensures``: the invariants need the interface before the rewrite.
        original = Analyses.of(model)
        analyses = self.require_applicable(model)
        is_prepared = not original.is_current
        expected = self.expected_interface(interface(model), analyses)
        modified = self.rewrite_graph(analyses) or is_prepared
        check_invariants(expected, model, after=type(self).__name__)
        return ir.passes.PassResult(model, modified=modified)

    def require_applicable(self, model: ir.Model) -> Analyses:
        """Run the stages before the rewrite: validate, prepare and check.

        Returns:
            The analyses of the prepared graph.

        Raises:
            InvalidArgument: The parameters do not fit the model.
            CannotRewrite: The pass does not apply to the model.
        """
        self.validate(Analyses.of(model))
        self.prepare(Analyses.of(model))
        analyses = Analyses.of(model)
        self.check(analyses)
        return analyses

    # ---- the stages, overridden by passes -------------------------------------------------------

    def validate(self, analyses: Analyses) -> None:
        """Raise InvalidArgument if the parameters do not fit the model. The graph does not change.

        By default, any model fits.
        """

    def prepare(self, analyses: Analyses) -> None:
        """Edit the graph as the later stages need it.

        The edit is exact, because the pass may still be refused. A second call changes nothing.
        By default, nothing is edited.
        """

    def check(self, analyses: Analyses) -> None:
        """Raise CannotRewrite if the pass does not apply. The graph does not change.

        By default, the pass applies to every model.
        """

    @abstractmethod
    def rewrite_graph(self, analyses: Analyses) -> bool:
        """Change the graph, and return whether anything changed."""

    def expected_interface(self, before: Interface, analyses: Analyses) -> Interface:
        """The interface of the rewritten model; by default as before, with ``caches``."""
        return before.with_caches(self.caches(analyses))

    def caches(self, analyses: Analyses) -> Mapping[str, CacheShape | None]:
        """The caches that the pass changes, by the name of input or output; None if removed."""
        return {}

    # ---- the weights, overridden by passes that fit them to data ---------------------------------

    def fitted(
        self,
        model: ir.Model,
        moments_of: MomentsOf | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """The pass with fitted weights, which prepares the graph; by default the pass itself.

        Args:
            moments_of: Without moments, a block is fitted to its weights alone.
            progress: Called with (blocks done, blocks in total).
        """
        return self

    def unfitted(self, model: ir.Model) -> Self:
        """The pass with placeholders for the weights, for models that are only timed."""
        return self

    def approximation_error(self, name: str) -> float | None:
        """The error of a block in the metric that the fit minimizes; None without a fit."""
        return None

    # ---- JSON ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The entry of this pass in plan.json."""
        return {"pass": self.name}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RewritePass:
        """Read an entry of plan.json.

        Raises:
            InvalidArgument: The entry has keys or values that the pass does not know.
        """
        _require_keys(cls.name, content, {"pass"})
        return cls()


class BlockPass(RewritePass, Generic[BlockT, Params]):
    """A pass over single blocks.

    A subclass defines ``refusal`` and ``rewrite``, and ``validate_params`` if parameters depend on
    the block. This class finds the blocks, keeps their names, and removes unused nodes after the
    rewrite. A pass whose targets depend on each other also extends ``validate`` or ``check``.

    Attributes:
        targets: The parameters for each block to rewrite, by the block's name.
        params: Validates the parameters of one block, and writes them as JSON: the adapter of the
            type ``Params`` of the class.
        noun: The word for a block in error messages.
    """

    params: ClassVar[TypeAdapter[Any]]
    noun: ClassVar[str] = "block"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__dict__.get("__orig_bases__", ()):
            if (kinds := get_args(base)) and not isinstance(kinds[-1], TypeVar):
                cls.params = TypeAdapter(kinds[-1])

    def __init__(self, targets: Mapping[str, object] | Collection[str]) -> None:
        """Validate the parameters of each block; a pass without parameters takes names alone.

        Args:
            targets: ``Params`` by block, or values that pydantic converts to them.

        Raises:
            InvalidArgument: The parameters of a block are invalid.
        """
        if not isinstance(targets, Mapping):
            targets = dict.fromkeys(targets, NoParams())
        self.targets: Mapping[str, Params] = {
            str(name): self._validated(str(name), value) for name, value in targets.items()
        }

    @classmethod
    def _validated(cls, name: str, value: object) -> Params:
        try:
            return cls.params.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"[{part!r}]" for part in first["loc"])
            raise InvalidArgument(
                f"{cls.name}: {name[:100]}{place} is {str(first['input'])[:80]!r}: {first['msg']}",
                f"see {cls.__name__} in {cls.__module__} for its parameters",
                code="pass.params",
            ) from error

    # ---- defined by a pass -----------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def find(cls, analyses: Analyses) -> Sequence[BlockT]:
        """Every block of the model that the pass could apply to, in order of execution."""

    @classmethod
    @abstractmethod
    def refusal(cls, block: BlockT, params: Params | None, analyses: Analyses) -> Refusal | None:
        """Return why a block cannot be rewritten; None if it can. The method raises no error.

        Args:
            block: A block of the prepared graph; of the unprepared graph if ``params`` is None.
            params: Parameters that are valid for the block; None checks only whether any
                parameters could apply.
        """

    @abstractmethod
    def rewrite(self, targets: Sequence[tuple[BlockT, Params]], analyses: Analyses) -> None:
        """Rewrite blocks, which are in order of execution.

        The base class removes nodes that become unused.
        """

    # ---- overridden by some passes ---------------------------------------------------------------

    @classmethod
    def validate_params(cls, block: BlockT, params: Params) -> None:
        """Raise InvalidArgument if the parameters do not fit the block.

        By default, all values of the type ``Params`` fit.
        """

    @classmethod
    def changes(cls, block: BlockT, params: Params) -> bool:
        """Whether these parameters, which are valid for the block, change it at all."""
        return True

    def sizes(self, name: str, block: BlockT | None) -> dict[str, int | None]:
        """The sizes of a rewritten block by their names in reports.

        Args:
            name: The block's name in ``targets``.
            block: The block after the rewrite; None if it was removed.
        """
        return {}

    # ---- the stages of a pass --------------------------------------------------------------------

    def validate(self, analyses: Analyses) -> None:
        """Validate the parameters of each target.

        Raises:
            CannotRewrite: No block has the name of a target.
            InvalidArgument: Parameters do not fit their block.
        """
        by_name = {block.name: block for block in self.find(analyses)}
        for name, params in self.targets.items():
            if (block := by_name.get(name)) is None:
                names = ", ".join(list(by_name)[:8]) or "none"
                raise CannotRewrite(
                    f"{name}: no {self.noun} has this name; the model has {names}"
                    + (", ..." if len(by_name) > 8 else ""),
                    "use one of the names",
                    code="rewrite.unknown_block",
                )
            self.validate_params(block, params)

    def check(self, analyses: Analyses) -> None:
        """Ask ``refusal`` for each block that changes.

        Raises:
            CannotRewrite: A block is refused.
        """
        for block, params in self._changed(analyses):
            if refusal := self.refusal(block, params, analyses):
                raise refusal.error(block.name, "leave this block out")

    def rewrite_graph(self, analyses: Analyses) -> bool:
        model = analyses.model
        targets = self._changed(analyses)
        if not targets:
            return False
        since = frozenset(model.graph.initializers)
        old_nodes = frozenset(model.graph.all_nodes())
        pin_names(self.find(analyses))
        self.rewrite(targets, analyses)
        share_constants(model, since=since)
        remove_unused(model)
        new_nodes = (node for node in model.graph.all_nodes() if node not in old_nodes)
        pin_inserted(new_nodes, self.targets.keys())
        redirect_shapes(model, [b for b, _ in targets if isinstance(b, AttentionBlock)])
        return True

    def _changed(self, analyses: Analyses) -> list[tuple[BlockT, Params]]:
        """The blocks that the pass changes, with their parameters, in order of execution."""
        blocks = [block for block in self.find(analyses) if block.name in self.targets]
        targets = [(block, self.targets[block.name]) for block in blocks]
        return [(block, params) for block, params in targets if self.changes(block, params)]

    def to_json(self) -> dict[str, Any]:
        targets = {
            name: self.params.dump_python(value, mode="json")
            for name, value in self.targets.items()
        }
        return {"pass": self.name, "targets": targets}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RewritePass:
        _require_keys(cls.name, content, {"pass", "targets"})
        targets = content.get("targets")
        if not isinstance(targets, Mapping):
            raise InvalidArgument(
                f"{cls.name}: targets is {str(targets)[:80]!r}, expected an object by block",
                "write {block name: parameters}",
                code="pass.params",
            )
        return cls(cast(Mapping[str, object], targets))


class AttentionPass(BlockPass[AttentionBlock, Params]):
    """A pass over attention blocks."""

    noun: ClassVar[str] = "attention"

    def sizes(self, name: str, block: AttentionBlock | None) -> dict[str, int | None]:
        return {"heads": 0 if block is None else block.q.num_heads}

    @classmethod
    def find(cls, analyses: Analyses) -> Sequence[AttentionBlock]:
        return analyses.get(find_attention).blocks


class FeedForwardPass(BlockPass[FeedForwardBlock, Params]):
    """A pass over feed-forward blocks."""

    noun: ClassVar[str] = "feed-forward"

    def sizes(self, name: str, block: FeedForwardBlock | None) -> dict[str, int | None]:
        return {"neurons": 0 if block is None else block.num_neurons}

    @classmethod
    def find(cls, analyses: Analyses) -> Sequence[FeedForwardBlock]:
        return analyses.get(find_feed_forward)


def _require_keys(name: str, content: Mapping[str, Any], expected: set[str]) -> None:
    unknown = sorted(content.keys() - expected)
    if unknown:
        raise InvalidArgument(
            f"{name}: unknown key {unknown[0][:100]!r}, expected {', '.join(sorted(expected))}",
            "remove the key, or use the version of attnserve that wrote it",
            code="pass.params",
        )


def small_shapes(analyses: Analyses, *, distinct_lengths: bool = False) -> ShapeInfo:
    """Shapes of all values at a small batch and length.

    Args:
        distinct_lengths: Give axes with different names different lengths.
    """
    return analyses.get(infer_shapes_small, batch=2, sequence=5, distinct_lengths=distinct_lengths)


def pin_all_names(analyses: Analyses) -> None:
    """Record the names of all blocks, before a pass changes constants that names come from."""
    pin_names(analyses.get(find_attention).blocks)
    pin_names(analyses.get(find_feed_forward))
