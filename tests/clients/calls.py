"""Calls of unmodified clients of the service, in an environment that has one client only.

Usage: python calls.py CLIENT JOB.json RESULT.json

JOB has the address and the API key of a server, texts and token ids. RESULT has the answers:
vectors of ``texts``, of the ``query``, and of the first ``dimensions``; ``scores`` of a reranker.
A client is made with the address, the key, the name of the model, and what
docs/reference/clients.md names.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Job = dict[str, Any]


@contextmanager
def refused(error: type[Exception], *expected: str) -> Any:
    """Check that a call raises ``error`` with these texts in its message."""
    try:
        yield
    except error as raised:
        for text in expected:
            assert text in str(raised), (text, str(raised))
        return
    raise AssertionError(f"{error.__name__} expected")


def openai(job: Job) -> Job:
    from openai import APIStatusError, BadRequestError, OpenAI

    with OpenAI(base_url=job["url"] + "/v1", api_key=job["key"], max_retries=0) as client:

        def ask(value: Any, **options: Any) -> Any:
            answer = client.embeddings.create(model=job["model"], input=value, **options)
            vectors = [one.embedding for one in answer.data]
            return vectors[0] if isinstance(value, str) else vectors

        assert job["model"] in {model.id for model in client.models.list()}
        with refused(BadRequestError, "Unrecognized request argument supplied: top_k"):
            ask(job["query"], extra_body={"top_k": 3})
        with refused(BadRequestError, "check_embedding_ctx_length=False"):
            ask(job["foreign_ids"])
        with refused(APIStatusError, "texts in one request"):
            ask([job["query"]] * 2049)
        wrong = client.with_options(api_key="wrong")
        with refused(APIStatusError, "401"):
            wrong.models.list()
        by_ids = ask(job["ids"], encoding_format="float")
        assert len(by_ids) == len(job["texts"])
        return {
            "texts": ask(job["texts"], user="someone"),
            "texts by their ids": by_ids,
            "query": ask(job["query"]),
            "dimensions": ask(job["texts"], dimensions=job["dimensions"]),
        }


def langchain_openai(job: Job) -> Job:
    from langchain_openai import OpenAIEmbeddings
    from openai import BadRequestError

    def made(**options: Any) -> OpenAIEmbeddings:
        return OpenAIEmbeddings(
            base_url=job["url"] + "/v1", api_key=job["key"], model=job["model"],
            check_embedding_ctx_length=False, **options,
        )  # fmt: skip

    # By default it downloads OpenAI's tokenizer and sends its ids, as its own client does here.
    with refused(BadRequestError, "check_embedding_ctx_length=False"):
        made().client.create(model=job["model"], input=job["foreign_ids"])
    embeddings = made()
    return {
        "texts": embeddings.embed_documents(job["texts"]),
        "many texts": made().embed_documents(job["many"]),
        "query": asyncio.run(embeddings.aembed_query(job["query"])),
        "dimensions": made(dimensions=job["dimensions"]).embed_documents(job["texts"]),
    }


def langchain_huggingface_url(job: Job) -> Job:
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    embeddings = HuggingFaceEndpointEmbeddings(
        model=job["url"], huggingfacehub_api_token=job["key"]
    )
    return {
        "texts": embeddings.embed_documents(job["texts"]),
        "query": embeddings.embed_query(job["query"]),
    }


def langchain_huggingface(job: Job) -> Job:
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    # This version refuses a URL as its model.
    embeddings = HuggingFaceEndpointEmbeddings(
        model="any/name", huggingfacehub_api_token=job["key"]
    )
    embeddings.client = InferenceClient(base_url=job["url"], token=job["key"])
    return {
        "texts": embeddings.embed_documents(job["texts"]),
        "query": embeddings.embed_query(job["query"]),
    }


def huggingface_hub(job: Job) -> Job:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError

    client = InferenceClient(base_url=job["url"], token=job["key"])
    named = InferenceClient(base_url=f"{job['url']}/models/{job['model']}", token=job["key"])
    texts = client.feature_extraction(job["texts"])
    similar = client.sentence_similarity(
        job["query"], other_sentences=job["texts"], model=job["url"] + "/similarity"
    )
    with refused(HfHubHTTPError, "422"):
        client.feature_extraction(job["texts"], prompt_name="unknown")
    return {
        "texts": texts.tolist(),
        "many texts": named.feature_extraction(job["many"][:32]).tolist(),
        "query": client.feature_extraction(job["query"], truncate=True).tolist()[0],
        "dimensions": client.feature_extraction(
            job["texts"], dimensions=job["dimensions"]
        ).tolist(),
        "not normalized": client.feature_extraction(job["texts"], normalize=False).tolist(),
        "similarities": similar,
    }


def llama_index_tei(job: Job) -> Job:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    embeddings = TextEmbeddingsInference(
        model_name=job["model"], base_url=job["url"], auth_token=job["key"]
    )
    return {
        "texts": embeddings.get_text_embedding_batch(job["texts"]),
        "many texts": embeddings.get_text_embedding_batch(job["many"]),
        "query": asyncio.run(embeddings.aget_query_embedding(job["query"])),
    }


def llama_index_openai_like(job: Job) -> Job:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    def made(**options: Any) -> OpenAILikeEmbedding:
        return OpenAILikeEmbedding(
            model_name=job["model"], api_base=job["url"] + "/v1", api_key=job["key"], **options
        )

    embeddings = made()
    return {
        "texts": embeddings.get_text_embedding_batch(job["texts"]),
        "many texts": embeddings.get_text_embedding_batch(job["many"]),
        "query": asyncio.run(embeddings.aget_query_embedding(job["query"])),
        "dimensions": made(dimensions=job["dimensions"]).get_text_embedding_batch(job["texts"]),
    }


def haystack_openai(job: Job) -> Job:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    options: Job = {
        "api_base_url": job["url"] + "/v1",
        "api_key": Secret.from_token(job["key"]),
        "model": job["model"],
    }

    def embedded(texts: list[str], **more: Any) -> list[Any]:
        embedder = OpenAIDocumentEmbedder(progress_bar=False, **options, **more)
        found = embedder.run([Document(content=text) for text in texts])["documents"]
        return [document.embedding for document in found]

    return {
        "texts": embedded(job["texts"]),
        "many texts": embedded(job["many"]),
        "query": OpenAITextEmbedder(**options).run(job["query"])["embedding"],
        "dimensions": embedded(job["texts"], dimensions=job["dimensions"]),
    }


def haystack_tei(job: Job) -> Job:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    token = Secret.from_token(job["key"])
    options: Job = {
        "api_type": "text_embeddings_inference", "api_params": {"url": job["url"]}, "token": token,
    }  # fmt: skip

    def embedded(texts: list[str], **more: Any) -> list[Any]:
        embedder = HuggingFaceAPIDocumentEmbedder(progress_bar=False, **options, **more)
        found = embedder.run([Document(content=text) for text in texts])["documents"]
        return [document.embedding for document in found]

    query = HuggingFaceAPITextEmbedder(normalize=True, **options)
    # It asks for /rerank of the host, whatever the path of its URL.
    ranker = HuggingFaceTEIRanker(url=job["reranker_url"], token=token)
    documents = [Document(content=text, meta={"at": at}) for at, text in enumerate(job["ranked"])]
    ranks = ranker.run(query=job["ranker_query"], documents=documents)["documents"]
    return {
        "not normalized": embedded(job["texts"]),  # it sends "normalize": false by default
        "texts": embedded(job["texts"], normalize=True),
        "many texts": embedded(job["many"], normalize=True),
        "query": query.run(job["query"])["embedding"],
        "scores": [[one.meta["at"], one.score] for one in ranks],
    }


def cohere(job: Job) -> Job:
    from cohere import Client, ClientV2
    from cohere.errors import NotFoundError

    ranked: Job = {"query": job["ranker_query"], "documents": job["ranked"]}
    second = ClientV2(base_url=job["url"], api_key=job["key"])
    first = Client(base_url=job["url"], api_key=job["key"])
    with refused(NotFoundError, "unknown model 'other'"):
        second.rerank(model="other", **ranked)
    answer = first.rerank(model=job["reranker"], top_n=1, return_documents=True, **ranked)
    (best,) = answer.results
    assert best.document.text == job["ranked"][best.index]
    answer = second.rerank(model=job["reranker"], **ranked)
    return {"scores": [[one.index, one.relevance_score] for one in answer.results]}


def tritonclient(job: Job) -> Job:
    import numpy as np
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

    headers = {"authorization": f"Bearer {job['key']}"}
    client = InferenceServerClient(job["url"].removeprefix("http://"))
    assert client.is_server_ready(headers) and client.is_model_ready(job["model"], headers=headers)

    def vector(ids: list[int]) -> Any:
        inputs = []
        for name in client.get_model_metadata(job["model"], headers=headers)["inputs"]:
            values = np.array([ids] if name["name"] == "input_ids" else [[0] * len(ids)])
            values += name["name"] == "attention_mask"
            inputs.append(InferInput(name["name"], [1, len(ids)], name["datatype"]))
            inputs[-1].set_data_from_numpy(values)
        outputs = [InferRequestedOutput(job["output"])]
        found = client.infer(job["model"], inputs, outputs=outputs, headers=headers)
        return found.as_numpy(job["output"])[0].mean(axis=0).tolist()

    with refused(InferenceServerException, "unknown model 'other'"):
        client.get_model_metadata("other", headers=headers)
    return {"not normalized": [vector(ids) for ids in job["ids"]]}


def kserve(job: Job) -> Job:
    import numpy as np
    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
    from kserve.protocol.infer_type import RequestedOutput

    headers = {"authorization": f"Bearer {job['key']}"}

    async def run() -> list[Any]:
        client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        assert await client.is_server_ready(job["url"], headers=headers) is True
        vectors: list[Any] = []
        for ids in job["ids"]:
            values = {
                "input_ids": np.array([ids]),
                "attention_mask": np.ones((1, len(ids)), np.int64),
                "token_type_ids": np.zeros((1, len(ids)), np.int64),
            }
            inputs = []
            for name in job["inputs"]:
                inputs.append(InferInput(name, [1, len(ids)], "INT64"))
                inputs[-1].set_data_from_numpy(values[name], binary_data=True)
            outputs = [RequestedOutput(job["output"], {"binary_data": True})]
            request = InferRequest(job["model"], inputs, request_outputs=outputs)
            answer = await client.infer(
                job["url"], request, headers=headers, model_name=job["model"]
            )
            (found,) = answer.outputs
            vectors.append(found.as_numpy()[0].mean(axis=0).tolist())
        await client.close()
        return vectors

    return {"not normalized": asyncio.run(run())}


CALLS: dict[str, Callable[[Job], Job]] = {
    call.__name__: call
    for call in (
        openai, langchain_openai, langchain_huggingface, langchain_huggingface_url,
        huggingface_hub, llama_index_tei, llama_index_openai_like, haystack_openai, haystack_tei,
        cohere, tritonclient, kserve,
    )
}  # fmt: skip

if __name__ == "__main__":
    job = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps(CALLS[sys.argv[1]](job)))
