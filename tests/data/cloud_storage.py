"""Google Cloud Storage as far as reading needs it: subfolders as buckets, over the JSON API (listing, metadata, ranged reads).

https://cloud.google.com/storage/docs/json_api/v1/objects
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@contextmanager
def cloud_storage(buckets: Path) -> Iterator[str]:
    """Serve a folder; the query that a `gs://anonymous@bucket/name` address needs to be read from here.

    A process of its own: pyarrow holds the interpreter's lock while it opens an object.
    """
    process = subprocess.Popen([sys.executable, __file__, str(buckets)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        port = int(process.stdout.readline())
        yield f"?scheme=http&endpoint_override=127.0.0.1:{port}&retry_limit_seconds=5"
    finally:
        process.terminate()
        process.wait()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root = Path()

    def do_GET(self) -> None:
        """A bucket, a listing, an object's metadata, or its bytes."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        found = _PATH.fullmatch(url.path)
        bucket, listing, name = found.groups() if found else ("", None, None)
        folder = self.root / unquote(bucket)
        if not bucket or not folder.is_dir():
            self._answer(404, {"error": {"code": 404, "message": f"no {url.path}"}})
        elif name:
            self._object(folder, unquote(name), media=query.get("alt") == ["media"])
        elif listing:
            prefix = query.get("prefix", [""])[0]
            names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
            items = [_described(folder, found) for found in names if found.startswith(prefix)]
            self._answer(200, {"kind": "storage#objects", "items": items})
        else:
            self._answer(200, {"kind": "storage#bucket", "name": folder.name})

    def _object(self, folder: Path, name: str, media: bool) -> None:
        file = folder / name
        if not file.is_file():
            self._answer(404, {"error": {"code": 404, "message": f"no object {name}"}})
        elif media:
            data = file.read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), int(asked[2] or len(data) - 1)) if asked else (0, len(data) - 1)
            part = data[first : last + 1]
            span = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"} if asked else {}
            self._answer(206 if asked else 200, part, span)
        else:
            self._answer(200, _described(folder, name))

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


_PATH = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)(?:/(o)(?:/(.+))?)?")


def _described(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": folder.name,
        "size": str(file.stat().st_size),
        "generation": "1",
        "metageneration": "1",
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
        "etag": base64.b64encode(name.encode()).decode(),
    }


if __name__ == "__main__":
    _Handler.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
