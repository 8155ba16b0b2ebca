"""A client of an OpenAI-compatible endpoint that survives what endpoints do.

lost connection, 429, 5xx   tried again with growing pauses, or after the pause that the endpoint asks for
400, 413, 422               the request itself is refused (usually: longer than the context): RefusedError, one problem's business
401, 403                    InputError: the key
404                         InputError: the model's name, with the names that the endpoint has
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

from gemma_ray.errors import GemmaRayError, InputError, StageError
from gemma_ray.loopback import is_local

if TYPE_CHECKING:
    import httpx

_LONGEST_PAUSE_S = 60.0
_START_RETRIES = 2


class RefusedError(Exception):
    """The endpoint will never answer this one request; the message is its own."""


class Endpoint:
    """One endpoint, used as an async context manager.

    `url` is its root, with or without `/v1`; `retries` are further tries after the first, the pause before the i-th being about `pause_s` ·
    2^i.
    """

    def __init__(
        self,
        url: str,
        *,
        retries: int = 6,
        timeout_s: float = 7200.0,
        connections: int = 32,
        api_key: str | None = None,
        pause_s: float = 0.5,
    ):
        self.url = url.rstrip("/").removesuffix("/v1")
        self._retries = retries
        self._timeout_s = timeout_s
        self._connections = connections
        self._api_key = api_key
        self._pause_s = pause_s
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Endpoint:
        import httpx

        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=self._connections)
        timeout = httpx.Timeout(self._timeout_s, connect=10.0, pool=None)
        try:
            address = httpx.URL(self.url)
            if address.port is not None and not 0 < address.port < 1 << 16:
                raise ValueError(f"no port {address.port}")
            self._client = httpx.AsyncClient(
                base_url=self.url, headers=headers, limits=limits, timeout=timeout, trust_env=not is_local(self.url)
            )
        except (httpx.InvalidURL, ValueError) as e:
            raise InputError(f"'{self.url}' is not a URL: {e}") from e
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def models(self) -> list[str] | None:
        """Names of the models that the endpoint has; None when it does not say. Raises InputError when nothing answers."""
        try:
            answer = await self._request("GET", "/v1/models", None, min(self._retries, _START_RETRIES))
            return [str(model["id"]) for model in answer["data"]]
        except (RefusedError, _NotFoundError, KeyError, TypeError):
            return None
        except StageError as e:  # the first request: it never answered
            raise InputError(str(e)) from e

    async def choose_model(self, model: str | None) -> str:
        """`model` when the endpoint has it, or its only one when None. Raises InputError naming the models otherwise."""
        names = await self.models()
        if names is None or model in names:
            if model is None:
                raise InputError(f"{self.url} does not list its models: name one")
            return model
        if model is None and len(names) == 1:
            return names[0]
        problem = "serves several models: choose one of" if model is None else f"has no model '{model}'. It has"
        raise InputError(f"{self.url} {problem} {', '.join(names) or 'none'}")

    async def chat(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of one chat completion. Raises RefusedError, InputError (key, model) or StageError (out of tries, no choices)."""
        try:
            answer = await self._request("POST", "/v1/chat/completions", body, self._retries)
        except _NotFoundError as e:
            await self.choose_model(body["model"])
            raise InputError(f"{self.url} has no /v1/chat/completions: {e}") from e
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or not choices:
            raise StageError(f"{self.url} answered without choices: {str(answer)[:200]}")
        return choices

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, retries: int) -> Any:
        import httpx

        assert self._client is not None, "use Endpoint as an async context manager"
        trouble, pause_s = "", 0.0
        for attempt in range(retries + 1):
            if attempt:
                backoff_s = min(_LONGEST_PAUSE_S, self._pause_s * 2 ** (attempt - 1)) * random.uniform(0.75, 1.25)
                await asyncio.sleep(max(pause_s, backoff_s))
            pause_s = 0.0
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.UnsupportedProtocol as e:
                raise InputError(f"'{self.url}' is not an http URL: {e}") from e
            except httpx.RequestError as e:
                trouble = f"{type(e).__name__}: {e}".rstrip(": ")
                continue
            if response.status_code == 429 or response.status_code >= 500:
                trouble, pause_s = f"HTTP {response.status_code}: {_message(response)}", _retry_after_s(response)
                continue
            return self._answer(response)
        raise StageError(
            f"no answer from {self.url}{path} in {retries + 1} tries, last: {trouble}. Is it serving? (`gemma-ray serve RECIPE`)"
        )

    def _answer(self, response: httpx.Response) -> Any:
        status = response.status_code
        if status in (400, 413, 422):
            raise RefusedError(f"HTTP {status}: {_message(response)}")
        if status in (401, 403):
            raise InputError(f"{self.url} refuses the key (HTTP {status}). eval.api_key_env names the environment variable that holds it")
        if status == 404:
            raise _NotFoundError(_message(response))
        try:
            if status == 200:
                return _document(response)
        except ValueError:
            pass
        raise StageError(f"{response.url} is not an OpenAI-compatible endpoint: HTTP {status}, {response.text[:100]!r}")


class _NotFoundError(GemmaRayError):
    """HTTP 404: the path, or the model."""


def _document(response: httpx.Response) -> Any:
    """The JSON of an answer, with every half of a surrogate pair replaced: no file could hold it. Raises ValueError."""
    try:
        return json.loads(json.dumps(response.json(), ensure_ascii=False).encode(errors="replace"))
    except RecursionError as e:
        raise ValueError("thousands of brackets") from e


def _message(response: httpx.Response) -> str:
    """The endpoint's own words on one line, whichever of the usual places they are in."""
    try:
        body = _document(response)
    except ValueError:
        body = response.text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return " ".join(str(body).split())[:300]


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0
