"""LitServe with dynamic batching.

python peer_litserve.py MODEL_FOLDER PORT THREADS MAX_BATCH BATCH_TIMEOUT_S
"""

import sys
from pathlib import Path

import litserve
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

FOLDER, PORT, THREADS, MAX_BATCH = Path(sys.argv[1]), *map(int, sys.argv[2:5])
TIMEOUT_S = float(sys.argv[5])


class Embed(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self.tokenizer.enable_truncation(256)
        self.tokenizer.enable_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        self.session = onnxruntime.InferenceSession(
            str(FOLDER / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.wanted = [value.name for value in self.session.get_inputs()]

    def decode_request(self, request: dict) -> str:
        return request["inputs"]

    def batch(self, inputs: list) -> list:
        return inputs

    def predict(self, texts: list) -> np.ndarray:
        encodings = self.tokenizer.encode_batch(texts)
        values = {
            "input_ids": [encoding.ids for encoding in encodings],
            "attention_mask": [encoding.attention_mask for encoding in encodings],
            "token_type_ids": [encoding.type_ids for encoding in encodings],
        }
        feed = {name: np.array(values[name], dtype=np.int64) for name in self.wanted}
        hidden = self.session.run(None, feed)[0]
        mask = np.array(values["attention_mask"], dtype=np.float32)[..., None]
        mean = (hidden * mask).sum(axis=1) / mask.sum(axis=1)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def unbatch(self, output: np.ndarray) -> list:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict:
        return {"embeddings": [output.tolist()]}


if __name__ == "__main__":
    api = Embed(api_path="/embed", max_batch_size=MAX_BATCH, batch_timeout=TIMEOUT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=PORT, log_level="warning", generate_client_file=False)
