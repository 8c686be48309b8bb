"""A backend of sentence-transformers: encode() in the process, without a server.

    python peer_sentence_transformers.py MODEL_FOLDER THREADS onnx|torch|openvino

Reads lines {"texts": [...], "seconds": S, "batch": 32 or null}. Encodes the texts in order, one
batch per call (null: all texts in one call, which sorts them by length), repeatedly for S seconds.
Answers {"texts": number of texts, "seconds": duration, "vectors": those of the first batch}.
"""

import json
import sys
from time import perf_counter

import onnxruntime
import torch
from sentence_transformers import SentenceTransformer

FOLDER, THREADS, BACKEND = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def model_options() -> dict[str, object]:
    """The options of the backend: one process, ``THREADS`` threads, no downloads."""
    if BACKEND == "onnx":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        return {
            "provider": "CPUExecutionProvider",
            "session_options": options,
            "file_name": "model.onnx",
        }
    if BACKEND == "openvino":
        return {"ov_config": {"INFERENCE_NUM_THREADS": str(THREADS)}}
    return {}


def main() -> None:
    torch.set_num_threads(THREADS)
    model = SentenceTransformer(
        FOLDER, device="cpu", backend=BACKEND, local_files_only=True, model_kwargs=model_options()
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
