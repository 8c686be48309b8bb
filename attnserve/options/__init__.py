"""The options of the commands, as types. Each option is defined once, in ``groups``.

The first paragraph of a field's docstring is its help (only a text with computed values is a
``description``), its bounds are its check, and its value travels to the code that uses it. The
options of the command line (``attnserve.cli.command``), the keywords of the Python functions
(``with_keywords``), the reference and the tests of invalid values are generated from these types.
Nothing heavy is imported: ``attnserve --help`` needs them.
"""

from attnserve.options.base import (
    Cli,
    Options,
    OptionType,
    expected_values,
    is_group,
    option_name,
    option_type,
    with_keywords,
    without_prefixes,
)
from attnserve.options.fields import Allowed, Lengths, Ranks
from attnserve.options.groups import (
    GROUPS,
    Data,
    Goal,
    Rewrites,
    Run,
    Target,
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
    "Data",
    "Goal",
    "Lengths",
    "OptionType",
    "Options",
    "Ranks",
    "Rewrites",
    "Run",
    "Target",
    "Training",
    "Write",
    "check_files",
    "check_mode",
    "check_seed",
    "expected_values",
    "is_group",
    "option_name",
    "option_type",
    "with_keywords",
    "without_prefixes",
]
