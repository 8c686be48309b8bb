"""The options of the commands, as types. Each option is defined once, in ``groups``.

The first paragraph of a field's docstring is the help of the option. A text that several fields
share, or with computed values, is a ``description`` instead. The bounds of the type are checked.
The options of the command line (``attnserve.cli.command``), the keywords of the Python functions
(``with_keywords``), the reference and the tests of invalid values are generated from these types.
The package imports no large library, because ``attnserve --help`` imports it.
"""

from attnserve.options.base import (
    Cli,
    Option,
    Options,
    is_group,
    with_keywords,
    without_prefixes,
)
from attnserve.options.fields import Allowed, Lengths, Ranks
from attnserve.options.groups import (
    GROUPS,
    Comparison,
    Data,
    Goal,
    Rewrites,
    Run,
    Scoring,
    Target,
    Timing,
    Training,
    Write,
    check_files,
    check_seed,
)
from attnserve.options.modes import check_mode

__all__ = [
    "GROUPS",
    "Allowed",
    "Cli",
    "Comparison",
    "Data",
    "Goal",
    "Lengths",
    "Option",
    "Options",
    "Ranks",
    "Rewrites",
    "Run",
    "Scoring",
    "Target",
    "Timing",
    "Training",
    "Write",
    "check_files",
    "check_mode",
    "check_seed",
    "is_group",
    "with_keywords",
    "without_prefixes",
]
