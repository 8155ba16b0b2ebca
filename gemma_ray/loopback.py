"""Whether an endpoint is on this machine: a proxy of the environment is for the world outside, never for such a one."""

from __future__ import annotations

from urllib.parse import urlsplit

HOSTS = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})


def is_local(url: str) -> bool:
    """True for the loopback addresses and names; False for a URL that is none."""
    try:
        return urlsplit(url).hostname in HOSTS
    except ValueError:
        return False
