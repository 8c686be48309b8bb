"""Attack real servers and commands for some minutes; exit with 1 if anything is found.

    python -m tests.attack --minutes 60

runs each attack for an equal part of the time. A finding is an answer with a status of 500 or more,
a wrong answer, a crash, a hang or growing memory, and is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests.attack.attacks import ATTACKS, Run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10, help="time of all attacks (10)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="(random)")
    parser.add_argument("--only", choices=ATTACKS, action="append", help="run this attack; repeat")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    given = parser.parse_args()
    names: list[str] = given.only or list(ATTACKS)
    found = 0
    for name in names:
        run = Run(name, 60 * given.minutes / len(names), seed=given.seed, first=given.first)
        with tempfile.TemporaryDirectory() as folder:
            ATTACKS[name](run, Path(folder))
        print(f"{name}: seed {run.seed}, {dict(sorted(run.counts.items()))}", flush=True)
        for finding in run.findings:
            print(f"FOUND {finding}", flush=True)
        found += len(run.findings)
    print(f"{found} findings")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
