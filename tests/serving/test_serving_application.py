"""A real Serve application with two models: what a client of the OpenAI API relies on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gemma_ray.errors import ResourceError
from gemma_ray.serving.application import APPLICATION, Endpoint, serve_models
from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.deployment import ServedModel

ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 128 << 20}
TURN_END = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray

    assert not ray.is_initialized()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def config(free_port: int) -> ServeConfig:
    return ServeConfig(port=free_port, max_model_len=512, engine=ENGINE, ready_timeout_s=600)


@pytest.fixture(scope="module")
def models(tiny_model: Path, other_tiny_model: Path) -> list[ServedModel]:
    return [ServedModel("base", tiny_model), ServedModel("tuned", other_tiny_model)]


@pytest.fixture(scope="module")
def endpoint(cluster: None, models: list[ServedModel], config: ServeConfig) -> Iterator[Endpoint]:
    with serve_models(models, config) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=endpoint.url, timeout=120, trust_env=False) as client:
        yield client


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_health_is_ok_when_every_engine_answers(client: httpx.Client):
    response = client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_all_models_are_listed_with_their_context_length(client: httpx.Client):
    cards = client.get("/v1/models").json()["data"]
    assert {card["id"]: card["metadata"]["max_request_context_length"] for card in cards} == {"base": 512, "tuned": 512}


def test_each_name_answers_with_its_own_weights(client: httpx.Client, tiny_model: Path, other_tiny_model: Path):
    prompt = [2, 100, 200, 300, 400, 500]
    for name, folder in (("base", tiny_model), ("tuned", other_tiny_model)):
        answer = complete(client, model=name, prompt=prompt, max_tokens=12, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == greedy_by_transformers(folder, prompt, 12)


def greedy_by_transformers(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)[0].tolist()[len(prompt) :]


def test_chat_gives_n_samples(client: httpx.Client):
    body = {"model": "tuned", "messages": [{"role": "user", "content": "w1 w2 w3"}], "n": 5, "max_tokens": 8, "temperature": 1.0, "seed": 3}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1, 2, 3, 4]
    assert len({choice["message"]["content"] for choice in choices}) > 1


def test_chat_uses_the_models_own_template(client: httpx.Client):
    body = {"model": "base", "messages": [{"role": "user", "content": "w0 w1"}], "max_tokens": 1, "return_token_ids": True}
    response = client.post("/v1/chat/completions", json=body)
    assert response.json()["prompt_token_ids"] == [2, 4, 6, 8, 9, 5, 4, 7]


@pytest.mark.parametrize("token", [1, TURN_END])
def test_every_end_token_of_the_generation_config_stops(client: httpx.Client, token: int):
    answer = complete(client, model="base", prompt=[2, 9], max_tokens=20, logit_bias={str(token): 100}, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [token]
    assert choice["text"] == ""


def test_token_ids_stream_to_the_asked_length_past_end_tokens(client: httpx.Client):
    body = {
        "model": "base",
        "prompt": list(range(10, 138)),
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": {str(TURN_END): 100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = []
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line.removeprefix("data: ")))
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (128, 16)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "length"
    assert len(reasons) >= 8, "tokens were batched on their way"  # all 16, where nothing else is running


def test_an_unknown_model_is_not_found(client: httpx.Client):
    response = client.post("/v1/completions", json={"model": "nobody", "prompt": [2], "max_tokens": 1})
    assert response.status_code == 404
    assert "nobody" in response.text


def test_a_prompt_longer_than_the_context_is_the_clients_fault(client: httpx.Client):
    response = client.post("/v1/completions", json={"model": "base", "prompt": [9] * 600, "max_tokens": 1})
    assert response.status_code == 400
    assert "512" in response.text


def test_a_replica_is_two_processes(endpoint: Endpoint):
    """The worker runs inside the engine: Ray and vLLM still call the methods that `server.CpuEngine` overrides."""
    names = [child.name() for child in psutil.Process().children(recursive=True)]
    assert len([name for name in names if name.startswith("VLLM::EngineCor")]) == 2
    assert not [name for name in names if name.startswith("VLLM::Worker")]


def test_replicas_claim_their_cpus_and_the_front_door_none(endpoint: Endpoint):
    import ray

    assert ray.cluster_resources()["CPU"] == 2
    assert ray.available_resources().get("CPU", 0) == 0


def test_a_second_start_on_the_cluster_is_refused(endpoint: Endpoint, models: list[ServedModel], config: ServeConfig):
    with pytest.raises(ResourceError, match=f"already serves the application '{APPLICATION}'"):
        serve_models(models, config)
