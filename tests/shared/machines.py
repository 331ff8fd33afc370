"""Machines that a test drives by hand."""

from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, message


def settle(machine):
    """Deliver everything in order."""
    machine.deliver(machine.outbox)
    machine.outbox.clear()
    machine.validate()


def done(machine, actor):
    """End the firing of an actor that was started."""
    every = (machine.fireable, machine.detached, machine.flushing)
    next(started for started in every if actor in started).remove(actor)
    machine.receive(message(Message.DONE, actor))
    settle(machine)


def flushed(rate=3, num_slots=3):
    edges = [Edge("updated", 0, 1, 1, rate, num_slots), Edge("staging", 1, 2, 1, 1, 1)]
    return Machine(
        MachineTable.from_edges(["step", "snap", "write"], edges, sources=[0], flushed=[1])
    )
