"""The CrossEncoder of sentence-transformers in a backend: predict() in the process.

    python peer_cross_encoder.py MODEL_FOLDER THREADS torch|openvino|openvino-float32

Reads lines {"pairs": [[query, document], ...]}, and answers {"seconds": S, "scores": [...]}: the
duration of one call of predict(), and the logits.
"""

import json
import sys
from time import perf_counter

import torch
from sentence_transformers import CrossEncoder

FOLDER, THREADS, BACKEND = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def main() -> None:
    torch.set_num_threads(THREADS)
    backend, _, precision = BACKEND.partition("-")
    options = {"INFERENCE_NUM_THREADS": str(THREADS)}
    if precision:
        options["INFERENCE_PRECISION_HINT"] = "f32"
    model = CrossEncoder(
        FOLDER,
        device="cpu",
        backend=backend,
        local_files_only=True,
        activation_fn=torch.nn.Identity(),
        model_kwargs={"ov_config": options} if backend == "openvino" else {},
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
