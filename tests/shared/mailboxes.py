"""Messages between ranks that are threads of one process, whose order a seed draws."""

import random
import threading
from collections import defaultdict, deque

import numpy as np


class Mailboxes:
    """The messages of all ranks; `connect` is that of a `HierarchicalCommunicator`."""

    def __init__(self, seed=0, changed=lambda sender, receiver, data: data):
        self.boxes, self.lock = defaultdict(deque), threading.Lock()
        self.seed, self.changed = seed, changed
        self.ends = {}

    def connect(self, rank, num_ranks, gather):
        gather("connect", rank)
        self.ends[rank] = MailboxEnd(self, rank)
        return self.ends[rank]


class MailboxEnd:
    """One rank's end: some messages are copied when they are sent, others when they are read."""

    def __init__(self, mail, rank):
        self.mail, self.rank, self.next_tag = mail, rank, 7 * rank
        self.random = random.Random(f"{mail.seed} {rank}")
        self.bytes_sent, self.num_received, self.abandoned = 0, 0, []
        self.num_looks = 0

    def claim_tags(self, first, count):
        assert first >= self.next_tag
        self.next_tag = first + count

    def isend(self, data, peer, tag):
        self.bytes_sent += data.nbytes
        is_read_late = self.random.random() < 0.5
        sent = {"data": data if is_read_late else data.copy(), "is_done": not is_read_late}
        with self.mail.lock:
            self.mail.boxes[self.rank, peer, tag].append(sent)
        return sent

    def irecv(self, data, peer, tag):
        self.num_received += 1
        with self.mail.lock:  # a box that two threads make at once would lose what is in one
            box = self.mail.boxes[peer, self.rank, tag]
        return {"data": data, "box": box, "is_done": False, "peer": peer}

    def is_done(self, request):
        self.num_looks += 1
        if not request["is_done"] and "box" in request and self.random.random() < 0.7:
            with self.mail.lock:
                if request["box"]:
                    sent = request["box"].popleft()
                    data = self.mail.changed(request["peer"], self.rank, np.array(sent["data"]))
                    assert data.nbytes <= request["data"].nbytes
                    request["data"][: data.nbytes] = data
                    sent["is_done"] = request["is_done"] = True
        return request["is_done"]

    def abandon(self, request):
        self.abandoned.append(request)
