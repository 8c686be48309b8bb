"""The groups of options: bounds, text, keywords and the command line are the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import pytest

import attnserve
from attnserve.options import (
    Data,
    Goal,
    Options,
    Rewrites,
    Run,
    Target,
    Timing,
    Training,
    Write,
    with_keywords,
)
from attnserve.options.base import field_docstrings
from graph_passes.errors import InvalidArgument
from tests.attnserve.options.cases import CASES, GROUPS
from tests.errors import raises


@pytest.mark.parametrize(("group", "name", "value"), CASES)
def test_value_out_of_bounds_is_refused_and_named(group: type[Options], name: str, value: Any):
    with pytest.raises(InvalidArgument) as caught:
        group(**{name: value})
    assert f"`{name}`" in str(caught.value)
    assert caught.value.code == group.codes.get(name, f"{group.area}.range")


def test_help_of_every_option_is_its_docstring_or_that_of_its_type():
    for group in GROUPS:
        docstrings = field_docstrings(group.__module__)[group.__name__]
        for name, field in group.model_fields.items():
            assert field.description, f"{group.__name__}.{name}"
            assert field.description == docstrings.get(name, field.description)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Rewrites(collab_dk="128"), {"collab_dk": 128}),  # type: ignore[arg-type]
        (Rewrites(collab_dk="128,96"), {"collab_dk": (128, 96)}),  # type: ignore[arg-type]
        (Rewrites(skip="0, 1:constant"), {"skip": ("0", "1:constant")}),  # type: ignore[arg-type]
        (Goal(keep=0.9, recover="90s"), {"recover": 1.5}),  # type: ignore[arg-type]
        (Goal(keep=0.9, recover="1.5h"), {"recover": 90.0}),  # type: ignore[arg-type]
        (Target(sequence="16-512"), {"sequence": (16, 512)}),  # type: ignore[arg-type]
        (Target(sequence="128"), {"sequence": 128}),  # type: ignore[arg-type]
        (Data(calib="a.txt"), {"calib": (Path("a.txt"),)}),  # type: ignore[arg-type]
        (Timing(batches="1,8"), {"batches": (1, 8)}),  # type: ignore[arg-type]
        (Timing(batches=8), {"batches": (8,)}),  # type: ignore[arg-type]
    ],
)
def test_values_are_read_from_text(options: Options, expected: dict[str, Any]):
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        *((Rewrites, "collab_dk", text) for text in ("", "x", "1,", "1.5")),
        *((Target, "sequence", text) for text in ("abc", "5-", "9-2", "0", "-4", "0-16")),
        (Target, "sequence", (512, 16)),
        (Goal, "recover", "20x"), (Data, "calib_weights", "3;1"), (Rewrites, "layers", "0,,1"),
        (Rewrites, "skip", ""),
        *((Timing, "sequences", text) for text in ("", "x", "8,", "1.5", "0", "8,-4")),
        *(
            (Target, "sequence", value)
            for value in ((), [], (5,), ("a", "b"), ((1, 2),), [[1]], (math.nan, 5), (1, 2, 3), 0)
        ),
        *((Data, name, value) for name in ("calib", "also_prove") for value in (1, (1, 2), [[]])),
        *((Data, "calib_weights", value) for value in (1, ("a",), ((1, 2),), [None])),
        *((Rewrites, "collab_dk", value) for value in (1.5, ("a",), ((1, 2),), {"0": "a"})),
        *((Rewrites, "layers", value) for value in (1, (1,), ((),))),
        *((Goal, "recover", value) for value in ((), math.nan, math.inf, 0)),
        *(
            (group, name, value)
            for value in (True, False)
            for group, names in (
                (Rewrites, ("collab_dk", "head_dk", "prune")), (Goal, ("keep", "recover")),
                (Target, ("batch", "sequence")), (Run, ("threads", "seed")),
                (Write, ("min_cosine",)), (Training, ("minutes",)), (Timing, ("rounds", "batches")),
            )
            for name in names
        ),
    ],
)  # fmt: skip
def test_text_or_type_that_is_no_value_is_refused(group: type[Options], name: str, value: Any):
    with raises(InvalidArgument, f"{group.area}.range", f"`{name}`"):
        group(**{name: value})


OTHER_TYPES: list[Any] = [
    (), [], ("a", "b"), ("",), (None,), (math.nan, math.nan), (1.5, 2), ((1, 2),), [[1, 2]], [[]],
    (1, 2, 3), math.nan, math.inf, -math.inf, 10**30, -1, 1j, {}, {1: 2}, {1}, b"x", object(),
    float, "", "\0",
]  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_values_of_other_types_raise_invalid_argument_only(group: type[Options]):
    for name in group.model_fields:
        for value in OTHER_TYPES:
            with suppress(InvalidArgument):
                group(**{name: value})


@pytest.mark.parametrize("function", [attnserve.inspect, attnserve.report])
def test_seed_outside_of_a_group_is_checked_too(function: Callable[..., Any], tiny: Path):
    with raises(InvalidArgument, "run.range", "`seed` is -1"):
        function(tiny, seed=-1)


@with_keywords
def given(path: str, *, goal: Goal = Goal(), rewrites: Rewrites = Rewrites()) -> Any:
    return path, goal, rewrites


def test_keywords_are_the_fields_of_groups():
    expected = ("m", Goal(keep=0.9, measure="r2"), Rewrites(prune=0.5))
    assert given("m", keep=0.9, measure="r2", prune=0.5) == expected
    assert given("m", goal=Goal(keep=0.9), measure="r2", prune=0.5) == expected
    assert given("m") == ("m", Goal(), Rewrites())
    with pytest.raises(TypeError, match="unexpected keyword argument 'kep'"):
        given("m", kep=0.9)


def test_group_and_keywords_are_the_same_call(tiny: Path, tmp_path: Path):
    first = attnserve.optimize(tiny, tmp_path / "a", collab_dk=16, mixing="dense", batch=2)
    groups: Any = {"rewrites": Rewrites(collab_dk=16, mixing="dense"), "target": Target(batch=2)}
    second = attnserve.optimize(tiny, tmp_path / "b", **groups)
    assert first.changes == second.changes and first.record.batch == second.record.batch == 2
    assert first.output.read_bytes() == second.output.read_bytes()


def test_group_of_another_type_is_refused():
    wrong: list[Any] = ["texts.txt", None, {"keep": 0.9}, Rewrites()]
    for goal in wrong:
        with raises(InvalidArgument, "options.group", "`goal`"):
            given("m", goal=goal)


def test_field_as_keyword_and_in_its_group_is_refused():
    with raises(InvalidArgument, "options.conflict", "`keep`"):
        given("m", goal=Goal(keep=0.9), keep=0.8)


class _Path(PathLike[str]):
    def __fspath__(self) -> str:
        return "a.txt"


def test_paths_may_be_any_path_like_object():
    path: Any = _Path()
    paths: Any = [path]
    assert Data(calib=paths, tokenizer=path).tokenizer == Path("a.txt")
    assert Data(calib=path, also_prove=["b.txt"]).calib == Data(also_prove=paths).also_prove
    assert Goal(keep=0.9, task="sts", eval_data=path).eval_data == Path("a.txt")


def test_types_whose_source_cannot_be_read_have_no_help():
    scope: dict[str, Any] = {"Options": Options, "__name__": "builtins"}
    exec("class Typed(Options):\n    size: int = 1\n", scope)
    assert scope["Typed"](size=2).size == 2


def test_none_that_is_given_is_the_default():
    for group in (Goal, Rewrites, Data, Target):
        fields = group.model_fields.items()
        unset: dict[str, Any] = {name: None for name, field in fields if field.default is None}
        assert group(**unset) == group()
