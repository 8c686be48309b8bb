"""A bare session: what the numbers of every server are compared with.

    python bare.py MODEL_FOLDER THREADS

Reads a JSON list of texts a line and answers, a line each, {"run_ms": [...], "vectors": [[...]]}:
``session.run`` alone, on prepared inputs, one text at a time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

from attnserve.artifact import open_artifact
from attnserve.session import open_session
from attnserve.text import load_tokenizer, model_inputs, pool


def main() -> None:
    artifact = open_artifact(Path(sys.argv[1]))
    assert artifact.tokenizer is not None
    encoder = load_tokenizer(artifact.tokenizer, max_length=artifact.max_length)
    session = open_session(artifact.model, threads=int(sys.argv[2]))
    inputs, output = model_inputs(session), session.get_outputs()[0].name
    for line in sys.stdin:
        times: list[float] = []
        vectors: list[list[float]] = []
        for encoding in encoder.encode(json.loads(line)):
            feed = encoder.batch_inputs([encoding], inputs)
            started = perf_counter()
            (hidden,) = session.run([output], feed)
            times.append((perf_counter() - started) * 1e3)
            mask = feed["attention_mask"]
            vector = pool(np.asarray(hidden), mask, artifact.pooling, artifact.normalize)[0]
            vectors.append(vector.tolist())
        print(json.dumps({"run_ms": times, "vectors": vectors}), flush=True)


if __name__ == "__main__":
    main()
