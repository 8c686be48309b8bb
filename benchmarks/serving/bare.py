"""An ONNX Runtime session without a server, as the baseline of all servers.

    python bare.py MODEL_FOLDER THREADS [FILE]

With FILE, an .onnx file, that graph runs instead of the one of the folder (``exact.py`` writes the
graph that attnserve serves).

Reads one line of JSON and answers with one. A list of texts: {"run_ms": [...], "vectors": [[...]]}
of ``session.run`` alone, on prepared inputs, one text at a time. {"texts": [...], "pause_ms": P}:
the same with a pause before each run, as a server has it between two requests. {"texts": [...],
"batch": N, "seconds": S}: {"texts_per_s"} of runs of N texts of similar length, including
tokenization and pooling, which is the rate of a server without overhead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from attnserve.context import Device
from attnserve.models.artifact import open_artifact
from attnserve.models.embeddings import pool
from attnserve.models.tokenizer import model_inputs
from attnserve.models.tokenizer_files import load_encoder
from attnserve.runtime.session import open_session


def main() -> None:
    artifact = open_artifact(Path(sys.argv[1]))
    encoder = load_encoder(artifact)
    graph = Path(sys.argv[3]) if len(sys.argv) > 3 else artifact.model
    session = open_session(graph, Device(threads=int(sys.argv[2])))
    inputs, output = model_inputs(session), session.get_outputs()[0].name

    def vectors(feed: dict[str, np.ndarray], hidden: Any) -> np.ndarray:
        mask = feed["attention_mask"]
        return pool(np.asarray(hidden), mask, artifact.pooling, artifact.normalize)

    def one_by_one(texts: list[str], pause_ms: float = 0.0) -> dict[str, Any]:
        times: list[float] = []
        results: list[list[float]] = []
        for encoding in encoder.encode(texts):
            feed = encoder.batch_inputs([encoding], inputs)
            if pause_ms:
                sleep(pause_ms / 1e3)
            started = perf_counter()
            (hidden,) = session.run([output], feed)
            times.append((perf_counter() - started) * 1e3)
            results.append(vectors(feed, hidden)[0].tolist())
        return {"run_ms": times, "vectors": results}

    def in_batches(texts: list[str], batch: int, seconds: float) -> dict[str, float]:
        done, started = 0, perf_counter()
        while perf_counter() - started < seconds:
            encodings = sorted(encoder.encode(texts), key=len)
            # All lengths in random order, because the time limit may end a round.
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
        question = json.loads(line)
        if isinstance(question, list):
            question = {"texts": question}
        answer = (in_batches if "batch" in question else one_by_one)(**question)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
