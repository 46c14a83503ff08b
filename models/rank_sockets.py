"""The sockets between the ranks of one model. The launcher makes them: nothing here imports torch."""

import socket


def connect_ranks(size: int) -> list[list[socket.socket]]:
    """The socket pairs between the ranks of one model: per rank, one to each other rank, in their order."""
    sockets: dict[tuple[int, int], socket.socket] = {}
    for first in range(size):
        for second in range(first + 1, size):
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sockets[first, second], sockets[second, first] = pair
    return [[sockets[rank, other] for other in range(size) if other != rank] for rank in range(size)]
