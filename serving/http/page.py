"""The chat page at `/`: one file, sent with a policy under which nothing but it can run.

Scripts and styles are let in by the hashes of those that the file itself has, so no text that finds
its way into the page can be executed, and the page can talk to this server alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).parent.parent / "page" / "index.html"


def load_page(path: Path = PAGE) -> Response | None:
    """The response; None where the installation has no page."""
    if not path.is_file():
        return None
    html = path.read_bytes()
    headers = {"Content-Security-Policy": content_security_policy(html.decode("utf-8"))}
    return Response(html, headers=headers, media_type="text/html")


def content_security_policy(html: str) -> str:
    """Everything is forbidden but the file's own inline scripts and styles, images written out in
    it (`data:`), and requests to this server."""
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
