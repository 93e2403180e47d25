"""``samebits dashboard``: serve the page of this folder's job until stopped.

The command runs as a separate process, so that the scheduler stays small and the page outlives the job.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from samebits.config import Settings, is_loopback
from samebits.dashboard.guard import Guard, action_token_of, others_token_of, token_of
from samebits.errors import ListenError, SettingsError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.processes import DASHBOARD_NEEDS
from samebits.launcher.scheduler_link import SchedulerLink, known_addresses
from samebits.net.address import loopback
from samebits.net.curve import cluster_keys
from samebits.net.descriptors import raise_descriptor_limit
from samebits.option_types import port, seconds, whole

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from samebits.dashboard.connections import Connections

PORT = 8265
BACKLOG = 128
UNREAD_MS = 60_000
"""Milliseconds that sent data may stay unread before the kernel closes the connection (tcp(7)).

Otherwise, a suspended page would keep its connection forever. A page reconnects automatically when it resumes.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits dashboard",
        description="Serve a page that shows this folder's job while it runs and after its end. The page is read-only "
        "unless DASHBOARD=actions. Ctrl-C stops the page, not the job.",
    )
    parser.add_argument("--port", type=port, default=PORT, help=f"port to listen on (default {PORT}); 0: any free port")
    parser.add_argument(
        "--host", default=loopback(), help="address to listen on; any but loopback requires a CLUSTER_SECRET"
    )
    parser.add_argument(
        "--linger",
        type=seconds,
        default=None,
        metavar="S",
        help="exit S seconds after the scheduler and the last reader are gone",
    )
    parser.add_argument("--listener", type=whole(3), default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    missing = [name for name in DASHBOARD_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the dashboard needs {' and '.join(missing)}, which this Python does not have. "
            "Fix: pip install 'samebits[dashboard]'"
        )
    settings = job_spec.settings_here(only_looks=True)
    keys = cluster_keys(settings.cluster_secret, settings.cluster_secret_file)
    token = token_of(keys)
    if token is None and not is_loopback(options.host):
        raise SettingsError(
            [
                f"--host {options.host}: anyone who can reach it could read the job's logs; expected a CLUSTER_SECRET "
                "or CLUSTER_SECRET_FILE, which makes the page ask for a token. Fix: export CLUSTER_SECRET_FILE=<the "
                "job's>, or listen on 127.0.0.1 and reach it with `ssh -L`"
            ]
        )
    listener = (
        _listen(options.host, options.port) if options.listener is None else socket.socket(fileno=options.listener)
    )
    names = frozenset({options.host.lower(), socket.gethostname().lower(), *_hosts(settings)})
    action_token = action_token_of(keys, is_on=settings.dashboard.has_actions)
    guard = Guard(names, token, action_token, others_token_of(token, action_token))
    return _serve(settings, options.host, listener, guard, options.linger)


def _hosts(settings: Settings) -> set[str]:
    return {one.host.lower() for one in known_addresses(settings)}


def _serve(settings: Settings, host: str, listener: socket.socket, guard: Guard, linger_s: float | None) -> int:
    from samebits.dashboard.actions import Actions
    from samebits.dashboard.connections import Connections
    from samebits.dashboard.report import html_of_folder
    from samebits.dashboard.watching import JobWatch
    from samebits.dashboard.web_app import Pages, app_of

    link = SchedulerLink(settings)
    try:
        pages = Pages(JobWatch(settings, link), linger_s)
        actions = Actions(settings) if guard.action_token is not None else None
        app = app_of(pages, guard, lambda: html_of_folder(settings), actions)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/"
        token = guard.action_token or guard.token
        print(f"samebits: the dashboard is at {address}{f'?token={token}' if token else ''}", flush=True)
        if token is None:
            print(f"samebits: for other users of this machine: {address}?token={guard.others_token}", flush=True)
        server = server_of(app, Connections(raise_descriptor_limit()))

        def leave() -> None:
            server.should_exit = True

        pages.leave = leave
        server.run(sockets=[listener])
    finally:
        link.close()
        listener.close()
    return 0


def server_of(app: Starlette, connections: Connections) -> uvicorn.Server:
    """Return the page's web server, which the caller runs on a listening socket."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            server_header=False,
            backlog=connections.most,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16 << 10,
            http=connections.protocol,
            ws="none",
        )
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)  # inherited by its connections
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        raise ListenError(
            f"the dashboard cannot listen on {host}, port {port} ({error}). Fix: choose another port with --port"
        ) from None
    listener.set_inheritable(False)
    return listener
