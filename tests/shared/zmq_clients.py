"""Clients of a socket that is to let in few: with right keys, wrong ones, or none."""

import zmq
from zmq.utils.monitor import recv_monitor_message

ENOUGH_MS = 30_000


class Client:
    """A client of zmq that tells what happened to its connection."""

    def __init__(self, keys, *, name=b"0.1", pair=None, server=None, curve=True):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = name
        self.socket.reconnect_ivl = -1
        if curve:
            self.socket.curve_serverkey = server or keys.server_public
            own = pair or (keys.public, keys.secret)
            self.socket.curve_publickey, self.socket.curve_secretkey = own
        self.monitor = self.socket.get_monitor_socket()
        self.socket.connect(keys.endpoint)

    def event(self, *wanted):
        """Return the first event of a kind that is waited for."""
        while self.monitor.poll(ENOUGH_MS):
            event = self.next_event()
            if event in wanted:
                return event
        return None

    def next_event(self):
        """Return the next event."""
        return recv_monitor_message(self.monitor)["event"]

    def close(self):
        self.socket.disable_monitor()
        self.context.destroy(0)
