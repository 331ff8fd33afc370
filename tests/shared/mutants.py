"""Machines with a bug put in, and what finds it."""

from itertools import islice
from random import Random

from actors.machine.columns import MachineState
from actors.machine.errors import ProtocolError
from actors.machine.machine import Machine
from actors.machine.transitions import TRANSITIONS, Message, Reaction, State, kind_of
from actors.testing.oracle import OracleError, make_scenario, play

NUM_SEEDS = 600


class LooseColumns(MachineState):
    """Columns without the check of limits."""

    def refuse(self, code):
        actor = self.owner[code] if 0 <= code < len(self.owner) else self.table.num_actors
        if actor < self.table.num_actors and kind_of(code) <= Message.RETURN:
            cell = TRANSITIONS[State(self.state[actor])][kind_of(code)]
            if cell.reaction is not Reaction.ILLEGAL:
                return
        super().refuse(code)


class Loose(Machine):
    """A machine without the check of limits, and with a place to put a bug."""

    is_found_by_oracle = True
    columns_type = LooseColumns

    def __init__(self, table):
        self.rng = Random(table.num_actors)
        super().__init__(table)
        self.seed()

    def seed(self):
        """Put the bug in."""

    def intercept(self, send):
        """Have messages sent in another way."""
        self._send = self._ending.send = send


def killer(machine_type, seed):
    """What finds fault with a run: the oracle, the transition table (ProtocolError), or nothing."""
    rng = Random(seed)
    scenario = make_scenario(rng)
    try:
        play(scenario, machine_type(scenario.table), rng, is_checked=False, forged_share=0.0)
    except (OracleError, ProtocolError) as error:
        return type(error)
    return None


def is_killed(machine_type):
    """Whether three of a few hundred seeds find a mutant, by what is to find it."""
    finder = OracleError if machine_type.is_found_by_oracle else ProtocolError
    kills = (seed for seed in range(NUM_SEEDS) if killer(machine_type, seed) is finder)
    return len(list(islice(kills, 3))) == 3
