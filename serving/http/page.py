"""The chat page at `/`: one file, sent with a content security policy that allows nothing else.

The policy allows scripts and styles by the hashes of those in the file, so text that gets into the
page cannot be executed, and the page can send requests to this server alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).parent.parent / "page" / "index.html"


def load_page(path: Path = PAGE) -> Response | None:
    """The response with the page; None if the installation has no page."""
    if not path.is_file():
        return None
    html = path.read_bytes()
    headers = {"Content-Security-Policy": content_security_policy(html.decode("utf-8"))}
    return Response(html, headers=headers, media_type="text/html")


def content_security_policy(html: str) -> str:
    """The policy of a page: it allows the page's own inline scripts and styles, images in `data:`
    URLs, and requests to this server."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(html, 'script')}",
            f"style-src {_hashes(html, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(html: str, element: str) -> str:
    texts = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", html, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"
