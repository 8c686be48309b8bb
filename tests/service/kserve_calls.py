"""What ``test_clients.py`` asks kserve's client to do, with the address of a server as argument."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

from tests.service.tiny import hidden_states

IDS = np.array([[2, 4, 5, 3], [2, 6, 7, 3]])


def request(ids: np.ndarray = IDS, *, binary: bool, **options: Any) -> InferRequest:
    inputs: list[InferInput] = []
    for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids))):
        inputs.append(InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return InferRequest("tiny", inputs, **options)


async def refused(call: Awaitable[Any], status: int, text: str) -> None:
    try:
        await call
    except httpx.HTTPStatusError as error:
        assert error.response.status_code == status, error
        assert text in str(error), error
        return
    raise AssertionError(f"no error where {status} was expected: {text}")


async def main(address: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    assert await client.is_server_live(address) is True
    assert await client.is_server_ready(address) is True
    assert await client.is_model_ready(address, "tiny") is True
    for binary_in in (True, False):
        for options in (
            {},
            {"parameters": {"binary_data_output": True}},
            {"request_outputs": [RequestedOutput("last_hidden_state", {"binary_data": True})]},
            {"request_id": "seven"},
        ):
            answer = await client.infer(
                address, request(binary=binary_in, **options), model_name="tiny"
            )
            found = next(one for one in answer.outputs if one.name == "last_hidden_state")
            np.testing.assert_array_equal(found.as_numpy(), hidden_states(IDS))
            assert answer.model_name == "tiny"
            assert answer.id == options.get("request_id", answer.id)
            assert answer.parameters["tokens"] == 8
    await refused(
        client.infer(address, request(binary=True), model_name="other"), 404, "unknown model"
    )
    await refused(
        client.infer(address, request(IDS[0], binary=True), model_name="tiny"),
        422,
        "has shape [4]: expected [-1, -1]",
    )
    wrong = request(IDS.astype(np.int64), binary=False)
    wrong.inputs[0]._datatype = "INT32"
    await refused(client.infer(address, wrong, model_name="tiny"), 422, "expected int64")
    assert await client.is_model_ready(address, "other") is False
    await client.close()
    print("all calls as expected")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
