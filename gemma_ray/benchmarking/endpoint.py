"""The server under load: where it is, what it serves, and how long a sequence it takes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from gemma_ray.errors import InputError
from gemma_ray.loopback import is_local


@dataclass(frozen=True)
class Endpoint:
    """A server with /v1/models and /v1/completions, and the model that is asked of it, None for the only one it has."""

    base: str
    model: str | None
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, model: str | None, api_key: str | None = None) -> Endpoint:
        """From a URL with or without a trailing /v1. Raises InputError when it is not one of http or https."""
        base = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise InputError(f"--url '{url}': write http://host:port or https://host:port")
        return cls(base, model, api_key)

    @property
    def completions(self) -> str:
        return f"{self.base}/v1/completions"

    def client(self) -> aiohttp.ClientSession:
        """A client without a limit on connections: a limit would queue requests here and close the loop. Call it in the event loop."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        connections = aiohttp.TCPConnector(limit=0)
        limit = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(headers=headers, connector=connections, timeout=limit, trust_env=not is_local(self.base))

    async def resolve(self, client: aiohttp.ClientSession) -> tuple[str, int | None]:
        """The model's name, that of the only one served where none was asked for; and how many tokens a prompt and its answer may have.

        The limit is None when /v1/models does not tell. vLLM tells in `max_model_len`, Ray Serve LLM in
        `metadata.max_request_context_length`. Raises InputError when the server cannot be reached, is not OpenAI-compatible, or does not
        serve the model.
        """
        served = await self._served_models(client)
        names = ", ".join(sorted(served)) or "nothing"
        if self.model is None and len(served) != 1:
            raise InputError(f"{self.base} serves {names}: say which with --model")
        model = self.model or next(iter(served))
        if model not in served:
            raise InputError(f"{self.base} does not serve '{model}'; it serves {names}")
        return model, served[model]

    async def _served_models(self, client: aiohttp.ClientSession) -> dict[str, int | None]:
        try:
            async with asyncio.timeout(30.0), client.get(f"{self.base}/v1/models") as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            reason = str(e).split(" ssl:")[0]  # aiohttp adds its TLS settings, also to plain http
            raise InputError(f"nothing answers at {self.base} ({type(e).__name__}: {reason}). Start a server, or give --url") from e
        if status in (401, 403):
            raise InputError(f"{self.base} refuses access (HTTP {status}): give an API key")
        if status != 200:
            raise InputError(f"{self.base}/v1/models answers HTTP {status}: not an OpenAI-compatible endpoint, or not ready")
        try:
            return dict(map(_name_and_limit, json.loads(body)["data"]))
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as e:
            raise InputError(f"{self.base}/v1/models: not an OpenAI list of models") from e


def _name_and_limit(card: Any) -> tuple[str, int | None]:
    """A model of /v1/models and its longest sequence, None when untold. Raises TypeError and the like for what is no such card."""
    limit = card.get("max_model_len") or (card.get("metadata") or {}).get("max_request_context_length")
    if not isinstance(card["id"], str) or not isinstance(limit, int | None):
        raise TypeError(f"id {card['id']!r}, limit {limit!r}")
    return card["id"], limit
