"""A plain FastAPI + ONNX Runtime handler: one run per request.

    python peer_plain.py MODEL_FOLDER PORT THREADS sync|async

``sync``: FastAPI runs the handler in its thread pool. ``async``: it runs in the event loop.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import orjson
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from tokenizers import Tokenizer

FOLDER, PORT, THREADS, HANDLER = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]

app = FastAPI()
tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
tokenizer.enable_truncation(256)
tokenizer.no_padding()
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = THREADS
session = onnxruntime.InferenceSession(
    str(FOLDER / "model.onnx"), options, providers=["CPUExecutionProvider"]
)
wanted = [value.name for value in session.get_inputs()]


class EmbedRequest(BaseModel):
    inputs: str


def vector(text: str) -> np.ndarray:
    encoding = tokenizer.encode(text)
    values = {
        "input_ids": encoding.ids,
        "attention_mask": encoding.attention_mask,
        "token_type_ids": encoding.type_ids,
    }
    feed = {name: np.array([values[name]], dtype=np.int64) for name in wanted}
    mean = session.run(None, feed)[0][0].mean(axis=0)
    return mean / np.linalg.norm(mean)


def answer(text: str) -> Response:
    body = orjson.dumps({"embeddings": [vector(text)]}, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, media_type="application/json")


if HANDLER == "sync":

    @app.post("/embed")
    def embed(request: EmbedRequest) -> Response:
        return answer(request.inputs)

else:

    @app.post("/embed")
    async def embed(request: EmbedRequest) -> Response:
        return answer(request.inputs)


@app.get("/health")
def health() -> dict[str, bool]:
    return {"ready": True}


if __name__ == "__main__":
    uvicorn.run(
        app, port=PORT, loop="uvloop", http="httptools", access_log=False, log_level="warning"
    )
