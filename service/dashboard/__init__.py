"""The dashboard: one static page at / for browsers, which polls GET /stats.json once a second.

The page loads no external resource and works offline. Its Content-Security-Policy allows its own
script and style by checksum, and requests to the server that it came from.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import Response

PAGE = files(__name__).joinpath("index.html").read_bytes()


def _checksums(element: bytes) -> str:
    """The policy sources of the page's ``element`` contents."""
    contents = re.findall(rb"<%s>(.*?)</%s>" % (element, element), PAGE, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
        for content in contents
    )


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_checksums(b'script')}",
        f"style-src {_checksums(b'style')}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The page's Content-Security-Policy."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "etag": f'"{hashlib.sha256(PAGE).hexdigest()[:16]}"',
}


def page() -> Response:
    """The dashboard."""
    return Response(PAGE, headers=HEADERS, media_type="text/html; charset=utf-8")
