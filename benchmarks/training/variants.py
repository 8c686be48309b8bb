"""The variants of the translation benchmark and what their papers claim. Needs no torch.

Names are relative to the width D of the model: "collaborative-quarter" has D/4 query and key
dimensions in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

HEADS = 8
"""Heads of a layer, unless a variant says otherwise."""

GroupMaps = Literal["value", "attention", "output"]

MAPS: tuple[GroupMaps, ...] = get_args(GroupMaps)
"""The maps of heads that a group loss compares, in the order of tau."""


@dataclass(frozen=True)
class Settings:
    """Settings shared by all variants. Results of different settings cannot be compared.

    Attributes:
        layers: Number of layers of the encoder, and of the decoder.
        vocabulary: Tokens, shared by both languages.
        batch_tokens: Most tokens of a batch in either language, with padding.
        rate: Highest learning rate, after the warm-up.
        evaluate_every: Steps between points of the curve; each is a checkpoint too.
        longest: Longest sentence in tokens; longer training pairs are left out.
    """

    layers: int = 4
    width: int = 128
    hidden: int = 256
    dropout: float = 0.1
    vocabulary: int = 4000
    batch_tokens: int = 1024
    steps: int = 3000
    warm_up: int = 300
    rate: float = 2e-3
    smoothing: float = 0.1
    evaluate_every: int = 100
    longest: int = 64

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Variant:
    """Attention layers of one model, and their training.

    Attributes:
        kind: "standard" layers have D_k / H query and key dimensions per head and D / H of values;
            "fixed" ones D / 4 of each per head; "collaborative" ones share D_k among the heads.
        heads: H.
        shrink: D_k is D divided by this.
        keep: "all" heads, or, after half of the steps, one per group: the one elected by
            Voting-to-Stay, or any ("random").
        reuse: Configuration of ``reuse_transformer``, for each of encoder, decoder and cross
            attention.
        group_weight: alpha and beta of the group loss.
        group_maps: The maps that it compares.
    """

    name: str
    kind: Literal["standard", "fixed", "collaborative", "grouped"] = "standard"
    heads: int = HEADS
    shrink: int = 1
    keep: Literal["all", "elected", "random"] = "all"
    reuse: str = ""
    group_weight: float = 0.0
    group_maps: GroupMaps = "output"


GROUPED = Variant("ght", "grouped", group_weight=0.005, group_maps="output")
"""Weight and maps are the choice of ``group_loss``."""

SHRINKS = {"half": 2, "quarter": 4, "eighth": 8}

REUSE = {
    "reuse-partial-2": "partial:2",
    "reuse-partial-4": "partial:4",
    "reuse-full-1": "full:1",
    "reuse-full-2": "full:2",
    "reuse-alternate": "alternate",
    "reuse-all-end": "all-end:1",
    "skip": "skip:2",
}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("vanilla"),
        *(Variant(f"concatenated-{name}", shrink=by) for name, by in SHRINKS.items()),
        Variant("collaborative", "collaborative"),
        *(
            Variant(f"collaborative-{name}", "collaborative", shrink=by)
            for name, by in SHRINKS.items()
        ),
        *(Variant(f"standard-{heads}", heads=heads) for heads in (4, 16, 32)),
        *(Variant(f"fixed-{heads}", "fixed", heads=heads) for heads in (8, 16, 32)),
        GROUPED,
        replace(GROUPED, name="ght-ps", keep="elected"),
        replace(GROUPED, name="random-pruning", keep="random"),
        *(Variant(name, reuse=configuration) for name, configuration in REUSE.items()),
    )
}

SAME = {"concatenated": "vanilla", "standard-8": "vanilla", "fixed-4": "standard-4"}
"""Names of variants that are the same model as another."""

BASE = "baseline"

EXPERIMENTS: dict[str, dict[str, str]] = {
    "collaborative": {
        "concatenated": "27.40 BLEU on WMT14",
        "concatenated-half": "lower with smaller heads",
        "concatenated-quarter": "lower with smaller heads",
        "concatenated-eighth": "0.6 BLEU below the full size",
        "collaborative": "above concatenated",
        "collaborative-half": "no loss",
        "collaborative-quarter": "no loss",
        "collaborative-eighth": "within 0.1 BLEU of concatenated at the full size",
    },
    "fixed": {
        "standard-4": BASE,
        "standard-8": "better than fewer heads (BERT)",
        "standard-16": "SQuAD F1 0.28 below 8 heads",
        "standard-32": "SQuAD F1 0.44 below 8 heads",
        "fixed-4": BASE,
        "fixed-8": "better with more heads (BERT)",
        "fixed-16": "better with more heads (BERT)",
        "fixed-32": "better with more heads (BERT)",
    },
    "grouped": {
        "vanilla": BASE,
        "ght": "3.8% more BLEU than vanilla",
        "ght-ps": "as ght, with 32% fewer parameters",
        "random-pruning": "below ght-ps",
    },
    "reuse": {
        "vanilla": "39.22 BLEU on WMT18",
        "reuse-partial-2": "39.20 BLEU on WMT18",
        "reuse-partial-4": "39.05 BLEU on WMT18",
        "reuse-full-1": "no loss (BERT)",
        "reuse-full-2": "no loss (BERT)",
        "reuse-alternate": "below full (BERT)",
        "reuse-all-end": "below full and alternate (BERT)",
        "skip": "below full and alternate (BERT)",
    },
}
"""The claims of each paper by variant; translation unless another model is named."""


def find(names: Iterable[str]) -> list[Variant]:
    """The variants with these names, each once.

    Raises:
        KeyError: A name is unknown.
    """
    return [VARIANTS[name] for name in dict.fromkeys(SAME.get(name, name) for name in names)]
