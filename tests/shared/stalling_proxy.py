"""A link between two hosts that can stand still for a while: a TCP proxy on this machine."""

import socket
import threading
from contextlib import suppress


class StallingProxy:
    """Forwards connections to a port of this machine, unless it is stalled; drops no byte."""

    def __init__(self, port):
        self._port = port
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets, self._threads = [self._listener], []
        self._begin(self._accept)

    def stall(self):
        """Let nothing through, in both directions, until `go_on`."""
        self._goes_on.clear()

    def go_on(self):
        """Let through what has come meanwhile, and all that comes."""
        self._goes_on.set()

    def close(self):
        """Break all connections."""
        self._goes_on.set()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _begin(self, function, *arguments):
        thread = threading.Thread(target=function, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # nobody listens there yet
                near.close()
                continue
            self._sockets += [near, far]
            self._begin(self._forward, near, far)
            self._begin(self._forward, far, near)

    def _forward(self, source, sink):
        try:
            while data := source.recv(1 << 16):
                self._goes_on.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, sink):
                one.close()
