"""ZMQ sockets with the options all processes of a group agree on (vLLM vllm/utils/network_utils.py).

Must never send or receive.
"""

from __future__ import annotations

import ipaddress
import uuid
from pathlib import Path

import zmq
import zmq.asyncio

Context = zmq.asyncio.Context
Socket = zmq.asyncio.Socket

_UNLIMITED_RECEIVE = (zmq.PULL, zmq.DEALER, zmq.ROUTER)
_UNLIMITED_SEND = (zmq.PUSH, zmq.DEALER, zmq.ROUTER)


def tcp_address(host: str, port: int) -> str:
    """`tcp://host:port`, IPv6 in brackets."""
    return f"tcp://[{host}]:{port}" if _is_ipv6(host) else f"tcp://{host}:{port}"


def ipc_address(directory: Path) -> str:
    """A fresh `ipc://` address in a directory only this user can enter."""
    return f"ipc://{directory / uuid.uuid4().hex[:12]}"


def open_socket(
    context: Context,
    kind: int,
    *,
    bind: str | None = None,
    connect: str | None = None,
    identity: bytes | None = None,
    linger_ms: int = 0,
) -> Socket:
    """A bound or connected socket.

    No high-water mark on queues between processes (the scheduler bounds work, not the transport), and
    XPUB passes on every subscription, also repeated ones, so that the coordinator can count engines.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    socket = context.socket(kind)
    socket.linger = linger_ms
    if kind in _UNLIMITED_RECEIVE:
        socket.rcvhwm = 0
    if kind in _UNLIMITED_SEND:
        socket.sndhwm = 0
    if kind == zmq.XPUB:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    if identity is not None:
        socket.identity = identity
    address = bind or connect
    if address is None:
        raise ValueError("give an address to bind or to connect")
    if address.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    try:
        if bind is not None:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket


def bound_address(socket: Socket) -> str:
    """The address a socket was bound to, with the port the system chose."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    if not isinstance(endpoint, bytes):
        raise TypeError("LAST_ENDPOINT is a byte string")
    return endpoint.decode().rstrip("\0")


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
