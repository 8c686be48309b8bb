"""The ONNX backend of sentence-transformers: encode() in the process, without a server.

    python peer_sentence_transformers.py MODEL_FOLDER THREADS

Reads lines {"texts": [...], "seconds": S, "batch": 32 or null}. Encodes the texts in order, one
batch per call (null: all texts in one call, which sorts them by length), repeatedly for S seconds.
Answers {"texts": number of texts, "seconds": duration, "vectors": those of the first batch}.
"""

import json
import sys
from time import perf_counter

import onnxruntime
from sentence_transformers import SentenceTransformer

FOLDER, THREADS = sys.argv[1], int(sys.argv[2])


def main() -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    model = SentenceTransformer(
        FOLDER,
        backend="onnx",
        local_files_only=True,
        model_kwargs={
            "provider": "CPUExecutionProvider",
            "session_options": options,
            "file_name": "model.onnx",
        },
    )
    model.encode(["warm", "up"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        texts, batch = question["texts"], question["batch"] or len(question["texts"])
        vectors = model.encode(texts[:32], batch_size=32, normalize_embeddings=True)
        done, started = 0, perf_counter()
        while perf_counter() - started < question["seconds"]:
            for at in range(0, len(texts), batch):
                model.encode(
                    texts[at : at + batch],
                    batch_size=32,
                    show_progress_bar=False,
                    normalize_embeddings=True,
                )
                done += len(texts[at : at + batch])
                if perf_counter() - started >= question["seconds"]:
                    break
        taken = perf_counter() - started
        print(
            json.dumps({"texts": done, "seconds": taken, "vectors": vectors.tolist()}), flush=True
        )


if __name__ == "__main__":
    main()
