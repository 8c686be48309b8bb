"""Calls of one client library: `python calls.py NAME URL`, in the environment of that client.

Each function gives vectors or scores by the client; the caller compares them with plain HTTP.
"""

import json
import sys

TEXTS = ["a b c", "d"]


def openai(url):
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    try:
        client.embeddings.create(model="tiny", input=[[15339, 1917]])
        raise SystemExit("foreign token ids were accepted")
    except BadRequestError as error:
        assert "check_embedding_ctx_length=False" in str(error)
    answer = client.embeddings.create(model="tiny", input=TEXTS, user="someone", dimensions=4)
    return [one.embedding for one in answer.data]


def langchain_openai(url):
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(
        model="tiny", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    return model.embed_documents(TEXTS)


def langchain_huggingface(url):
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    # Its constructor takes names of repositories, not addresses.
    model = HuggingFaceEndpointEmbeddings(model="tiny", huggingfacehub_api_token="none")
    model.client = InferenceClient(url, token="none")
    assert len(model.embed_query("a")) == 4
    return model.embed_documents(TEXTS)


def llama_index_tei(url):
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    model = TextEmbeddingsInference(base_url=url, model_name="tiny")
    # Its default endpoint sends no instruction for a model that it does not know.
    return model.get_text_embedding_batch(TEXTS)


def llama_index_openai(url):
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    model = OpenAILikeEmbedding(model_name="tiny", api_base=f"{url}/v1", api_key="none")
    return model.get_text_embedding_batch(TEXTS)


def haystack_openai(url):
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.utils import Secret

    embedder = OpenAITextEmbedder(
        api_key=Secret.from_token("none"), model="tiny", api_base_url=f"{url}/v1"
    )
    return [embedder.run(text)["embedding"] for text in TEXTS]


def haystack_tei(url):
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPITextEmbedder,
    )

    embedder = HuggingFaceAPITextEmbedder(
        api_type="text_embeddings_inference", api_params={"url": url},
        token=Secret.from_token("none"),
    )  # fmt: skip
    return [embedder.run(text)["embedding"] for text in TEXTS]


def tritonclient(url):
    import numpy as np
    import tritonclient.http as http

    client = http.InferenceServerClient(url.removeprefix("http://"))
    assert client.is_server_ready() and client.is_model_ready("tiny")
    inputs = []
    for name, row in (("input_ids", [2, 7, 3]), ("attention_mask", [1, 1, 1])):
        inputs.append(http.InferInput(name, [1, 3], "INT64"))
        inputs[-1].set_data_from_numpy(np.array([row]))
    return client.infer("tiny", inputs).as_numpy("last_hidden_state")[0].tolist()


def kserve(url):
    import asyncio

    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

    async def ask():
        client = InferenceRESTClient(RESTConfig(protocol="v2"))
        inputs = [
            InferInput(name, [1, 3], "INT64", data=row)
            for name, row in (("input_ids", [2, 7, 3]), ("attention_mask", [1, 1, 1]))
        ]
        answer = await client.infer(url, InferRequest("tiny", inputs), model_name="tiny")
        (output,) = [one for one in answer.outputs if one.name == "last_hidden_state"]
        return output.as_numpy()[0].tolist()

    return asyncio.run(ask())


def cohere(url):
    from cohere import ClientV2

    client = ClientV2("none", base_url=url)
    answer = client.rerank(model="reranker", query="b", documents=["a", "b b"])
    return [[one.index, one.relevance_score] for one in answer.results]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
