"""Encode texts with a stock installation of sentence-transformers and OpenVINO, without attnserve.

Usage: python stock_sentence_transformers.py JOB.json RESULT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from sentence_transformers import CrossEncoder, SentenceTransformer

job = json.loads(Path(sys.argv[1]).read_text())
# OpenVINO computes in bfloat16 where the CPU has it.
exact = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
results: dict[str, Any] = {}
for folder in job["folders"]:
    options: dict[str, Any] = {"backend": "openvino", "device": "cpu", "model_kwargs": exact}
    if folder["kind"] == "embedding":
        encoder = SentenceTransformer(folder["path"], **options)
        results[folder["path"]] = {
            name: encoder.encode(job["texts"], prompt_name=name or None).tolist()
            for name in folder["prompts"]
        }
    else:
        scorer = CrossEncoder(folder["path"], **options)
        scores = [scorer.predict(one).tolist() for one in folder["inputs"]]
        results[folder["path"]] = {"": scores}
Path(sys.argv[2]).write_text(json.dumps(results))
