"""The listening socket: TCP or Unix. Opened before the model is loaded, so that a taken port is known at once."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from samovar.config.groups import ServerConfig
from samovar.errors import ConfigError

BACKLOG = 2048


def open_socket(config: ServerConfig) -> socket.socket:
    """Bind and listen as `config` says; raises `ConfigError` naming the address."""
    if config.uds is not None:
        return _open_unix(config.uds)
    return _open_tcp(config.host, config.port, "choose another --host or --port")


def open_private_socket(config: ServerConfig) -> socket.socket | None:
    """The second listener, on the loopback address only; None without --admin-port. Raises `ConfigError`."""
    if config.admin_port is None:
        return None
    return _open_tcp("127.0.0.1", config.admin_port, "choose another --admin-port")


def _open_tcp(host: str, port: int, remedy: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or str(error)}; {remedy}") from error
    listener.setblocking(False)
    return listener


def _open_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; choose another --uds") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens on any more; anything else is left for `bind` to complain about."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()


def address_of(listener: socket.socket) -> str:
    """What a client connects to: a URL, or unix:PATH."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
