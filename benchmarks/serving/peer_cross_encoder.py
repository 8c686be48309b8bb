"""The CrossEncoder of sentence-transformers in a backend: predict() in the process.

    python peer_cross_encoder.py MODEL_FOLDER THREADS torch|openvino|openvino-float32|onnx

Reads lines {"pairs": [[query, document], ...]}, and answers {"seconds": S, "scores": [...]}: the
duration of one call of predict(), and the logits.
"""

import json
import sys
from time import perf_counter
from typing import Any

import torch
from sentence_transformers import CrossEncoder

FOLDER, THREADS, BACKEND = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def model_options(backend: str, precision: str) -> dict[str, Any]:
    """The options of the backend; without a file, it exports the model."""
    if backend == "onnx":
        import onnxruntime

        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = THREADS
        return {"provider": "CPUExecutionProvider", "session_options": session}
    if backend == "openvino":
        hint = {"INFERENCE_PRECISION_HINT": "f32"} if precision else {}
        return {"ov_config": {"INFERENCE_NUM_THREADS": str(THREADS), **hint}}
    return {}


def main() -> None:
    torch.set_num_threads(THREADS)
    backend, _, precision = BACKEND.partition("-")
    model = CrossEncoder(
        FOLDER,
        device="cpu",
        backend=backend,
        local_files_only=True,
        activation_fn=torch.nn.Identity(),
        model_kwargs=model_options(backend, precision),
    )
    model.predict([("warm", "up")])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        pairs = [tuple(pair) for pair in json.loads(line)["pairs"]]
        started = perf_counter()
        scores = model.predict(pairs, batch_size=len(pairs), show_progress_bar=False)
        taken = perf_counter() - started
        print(json.dumps({"seconds": taken, "scores": scores.tolist()}), flush=True)


if __name__ == "__main__":
    main()
