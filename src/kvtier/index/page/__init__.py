"""The page of an index's server: the files behind `/`, and the headers that keep them harmless.

The page is static. Its script reads the same JSON as every client does, and writes what it finds as text
only: names of workers and models come from strangers. The headers allow no script but the page's own file,
no request to anywhere else and no frame around the page. All of this is read once, at import; any thread
may use it.
"""

from __future__ import annotations

from importlib.resources import files

__all__ = ["FILES", "HEADERS"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _read(package: str, name: str) -> bytes:
    return (files(package) / name).read_bytes()


FILES = {
    "/": (_read(__name__, "page.html"), "text/html; charset=utf-8"),
    "/style.css": (_read("kvtier", "style.css"), "text/css; charset=utf-8"),
    "/page.css": (_read(__name__, "page.css"), "text/css; charset=utf-8"),
    "/page.js": (_read(__name__, "page.js"), "text/javascript; charset=utf-8"),
}
"""Content and type by path."""
