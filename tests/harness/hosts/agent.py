"""Runs in the namespaces of a host: sets its network up, hands its end of the wire over, forwards HTTP to the host.

Arguments: address, the file that becomes the boot's id, the descriptor of the control socket, the descriptor of a
listening socket from outside. Connections to the latter are forwarded to port 8000 of this host. It ends when the
control socket does.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys

ROUTER_PORT = 8000
MTU = 65520  # each packet passes through Python: as few as can be

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFFLAGS = 0x8916, 0x891C, 0x8922, 0x8914
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_COPY_BYTES = 1 << 16


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


def _set_up(name: str, request: int, payload: bytes) -> None:
    """One ioctl about a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, request, struct.pack("16s24s", name.encode(), payload))


def _inet(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def make_interface(address: str) -> int:
    """The interface "wire0" with this address; returns the descriptor of its other end: packets, as they are."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"wire0", _IFF_TUN | _IFF_NO_PI))
    _set_up("wire0", _SIOCSIFADDR, _inet(address))
    _set_up("wire0", _SIOCSIFNETMASK, _inet("255.255.255.0"))
    _set_up("wire0", _SIOCSIFMTU, struct.pack("i", MTU))
    for name in ("lo", "wire0"):
        _set_up(name, _SIOCSIFFLAGS, struct.pack("h", _IFF_UP | _IFF_RUNNING))
    return fd


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_COPY_BYTES):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", ROUTER_PORT)
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
    for stream in (there_writer, writer):
        stream.close()


async def _serve(control: socket.socket, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    control.setblocking(False)
    server = await asyncio.start_server(_forward, sock=listener)
    await loop.sock_recv(control, 1)  # its end
    server.close()


def main() -> None:
    """Set up, report, forward."""
    address, boot_id_file, control_fd, listener_fd = sys.argv[1:]
    control = socket.socket(fileno=int(control_fd))
    try:
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount(boot_id_file, _BOOT_ID, None, _MS_BIND)  # another host, for pdkv and for UCX
        with contextlib.suppress(OSError):
            _mount("sysfs", "/sys", "sysfs", 0)  # with the interfaces of this namespace, which UCX looks up there
        wire = make_interface(address)
    except OSError as error:
        control.sendall(f"{error}".encode())
        return
    socket.send_fds(control, [b"ready"], [wire])
    os.close(wire)
    asyncio.run(_serve(control, socket.socket(fileno=int(listener_fd))))


if __name__ == "__main__":
    main()
