"""An index over HTTP: `kvtier index serve`.

Two threads do the work: one follows the publishers and owns their sockets, the other serves HTTP. The server
listens once the index's loops are compiled. Running requests finish before it stops.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvtier.errors import InputError, OutsideError
from kvtier.index.http import Access, HttpLimits, HttpServer
from kvtier.index.routes import Api
from kvtier.index.service import Registration, Service, Settings


def serve(
    host: str = "127.0.0.1",
    port: int = 8090,
    *,
    settings: Settings | None = None,
    limits: HttpLimits | None = None,
    access: Access | None = None,
    follow: Iterable[Registration] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve an index until SIGTERM or SIGINT; call it in the main thread.

    `on_ready` is called with the address once requests are answered. Port 0 takes a free port.
    """
    signals = signal.SIGTERM, signal.SIGINT

    async def serve_until_signalled() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        await run(host, port, service, limits, access, follow, on_ready, stop)

    # The event loop, which handles signals later, does not run yet.
    before = {number: signal.signal(number, _exit) for number in signals}
    try:
        service = make_service(host, settings)
        asyncio.run(serve_until_signalled())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(*_: object) -> None:
    """End the process, successfully, while the index's loops are compiled.

    An exception would pass through numba, which may turn it into a failure of its own.
    """
    os._exit(0)


def make_service(host: str, settings: Settings | None) -> Service:
    """Make the service of a server; a host that cannot be right is refused before anything is compiled."""
    if not host:  # the system would take it for every address
        expected = "expected an address such as 127.0.0.1, or 0.0.0.0 for all of the machine's"
        raise InputError(f"host: {expected}, got {host!r}")
    return Service(settings)


async def run(
    host: str,
    port: int,
    service: Service,
    limits: HttpLimits | None,
    access: Access | None,
    follow: Iterable[Registration],
    on_ready: Callable[[str], None] | None,
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set, and close the service."""
    access = access or Access()
    access = replace(access, hosts=(*access.hosts, host))
    server = HttpServer(Api(service, access), limits)
    try:
        for registration in follow:
            service.register(registration)
        try:
            bound, number = await server.start(host, port)
        except OSError as error:
            raise OutsideError(f"cannot listen on {host} port {port}: {error}") from None
        if on_ready is not None:
            on_ready(f"http://[{bound}]:{number}" if ":" in bound else f"http://{bound}:{number}")
        await stop.wait()
    finally:
        await server.close()
        service.close()
