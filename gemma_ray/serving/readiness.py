"""Waiting until a Serve application answers, and giving up as soon as it cannot.

Ready means that a client can start: `/health` is ok, `/v1/models` lists every model, and each model has answered one token.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from gemma_ray.errors import StageError
from gemma_ray.serving.failures import FAILED_START

POLL_S = 0.25
"""Between two requests to an endpoint that does not answer yet."""

STATUS_POLL_S = 3.0
"""Between two looks at Serve's status, which costs 0.1 s of CPU each while the replicas need every core."""


def wait_until_ready(application: str, url: str, models: Sequence[str], timeout_s: float) -> None:
    """Return when the application is ready as defined above; raise StageError with the cause when it failed, or with its state after
    `timeout_s`.
    """
    import httpx

    deadline = time.monotonic() + timeout_s
    next_status = time.monotonic() + STATUS_POLL_S
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as client:
        while waiting_for := _first_missing(client, models):
            now = time.monotonic()
            if now >= min(next_status, deadline):
                status = application_status(application)
                raise_if_failed(status)
                if now >= deadline:
                    states = ", ".join(f"{name} {d.status.value}" for name, d in status.deployments.items()) if status else "not deployed"
                    raise StageError(
                        f"the endpoint was not ready after {timeout_s:.0f} s (serve.ready_timeout_s), waiting for {waiting_for}; {states}"
                    )
                next_status = time.monotonic() + STATUS_POLL_S
            time.sleep(POLL_S)


def application_status(application: str) -> Any:
    """Serve's ApplicationStatusOverview, or None before it is known."""
    from ray import serve

    return serve.status().applications.get(application)


def raise_if_failed(status: Any) -> None:
    """Raise StageError with one line of cause when a deployment failed to start or keeps failing."""
    if status is None:
        return
    failed = {name: d for name, d in status.deployments.items() if d.status.value in ("DEPLOY_FAILED", "UNHEALTHY")}
    for name, deployment in failed.items():
        raise StageError(f"{name.replace(':', ' ', 1)} did not start: {short_cause(deployment.message)}")
    if status.status == "DEPLOY_FAILED":
        raise StageError(f"the application did not start: {short_cause(status.message)}")


def short_cause(message: str) -> str:
    """The one line of a Serve failure message that says why: the replica's own, else its last exception, else its last line."""
    ours = re.search(re.escape(FAILED_START) + r"(.+)", message)
    if ours:
        return ours[1].strip()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (exceptions or lines or ["no message"])[-1]


def _first_missing(client: Any, models: Sequence[str]) -> str:
    """What the endpoint does not do yet, or '' when it is ready."""
    import httpx

    try:
        if client.get("/health").status_code != 200:
            return "/health"
        listed = {card["id"] for card in client.get("/v1/models").raise_for_status().json()["data"]}
        for model in models:
            if model not in listed:
                return f"/v1/models to list '{model}'"
            body = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0}
            if not client.post("/v1/completions", json=body).raise_for_status().json()["choices"]:
                return f"a first token of '{model}'"
            # The first chat costs a replica seconds of imports that its first user should not pay. A model without a chat template refuses
            # it.
            chat = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
            if (answer := client.post("/v1/chat/completions", json=chat)).status_code >= 500:
                answer.raise_for_status()
    except httpx.HTTPError as e:
        return f"an answer ({type(e).__name__}: {e})"
    return ""
