"""A bare session: what the numbers of every server are compared with.

    python bare.py MODEL_FOLDER THREADS [FILE]

With FILE, an .onnx file, its graph is run in the place of the folder's (``exact.py`` writes the one
that our service runs).

A line of JSON in, a line out. A list of texts: {"run_ms": [...], "vectors": [[...]]} of
``session.run`` alone, on prepared inputs, one text at a time. {"texts": [...], "batch": N,
"seconds": S}: {"texts_per_s"}, of runs of N texts of like length, tokenized and pooled, which is
what a server without any cost of its own could do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from attnserve.models.artifact import open_artifact
from attnserve.models.tokenizer import load_tokenizer, model_inputs, pool
from attnserve.runtime.session import open_session


def main() -> None:
    artifact = open_artifact(Path(sys.argv[1]))
    assert artifact.tokenizer is not None
    encoder = load_tokenizer(artifact.tokenizer, max_length=artifact.max_length)
    graph = Path(sys.argv[3]) if len(sys.argv) > 3 else artifact.model
    session = open_session(graph, threads=int(sys.argv[2]))
    inputs, output = model_inputs(session), session.get_outputs()[0].name

    def vectors(feed: dict[str, np.ndarray], hidden: Any) -> np.ndarray:
        mask = feed["attention_mask"]
        return pool(np.asarray(hidden), mask, artifact.pooling, artifact.normalize)

    def one_by_one(texts: list[str]) -> dict[str, Any]:
        times: list[float] = []
        found: list[list[float]] = []
        for encoding in encoder.encode(texts):
            feed = encoder.batch_inputs([encoding], inputs)
            started = perf_counter()
            (hidden,) = session.run([output], feed)
            times.append((perf_counter() - started) * 1e3)
            found.append(vectors(feed, hidden)[0].tolist())
        return {"run_ms": times, "vectors": found}

    def in_batches(texts: list[str], batch: int, seconds: float) -> dict[str, float]:
        done, started = 0, perf_counter()
        while perf_counter() - started < seconds:
            encodings = sorted(encoder.encode(texts), key=len)
            # Every length in turn, whenever the time is up.
            starts = np.random.default_rng(0).permutation(range(0, len(texts), batch))
            for at in starts:
                some = encodings[at : at + batch]
                feed = encoder.batch_inputs(some, inputs)
                vectors(feed, session.run([output], feed)[0])
                done += len(some)
                if perf_counter() - started >= seconds:
                    break
        return {"texts_per_s": done / (perf_counter() - started)}

    for line in sys.stdin:
        asked = json.loads(line)
        answer = one_by_one(asked) if isinstance(asked, list) else in_batches(**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
