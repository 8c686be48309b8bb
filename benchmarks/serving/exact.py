"""Write the graph that the service runs: the model with fused operators.

    python exact.py MODEL_FOLDER THREADS FILE

Writes FILE, and prints one line of JSON (``planning.served_graph.fusion_report.FusionReport``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from attnserve.context import Device
from attnserve.models.artifact import open_artifact
from attnserve.planning.served_graph.lossless import fuse_lossless

if __name__ == "__main__":
    report = fuse_lossless(
        open_artifact(Path(sys.argv[1])), Path(sys.argv[3]), Device(threads=int(sys.argv[2]))
    )
    print(json.dumps(asdict(report)))
