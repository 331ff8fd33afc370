"""Thousands of seeds, the coverage of the table by them, and the command for a million."""

from functools import cache

import pytest
import tiers

from actors.machine.machine import Ending
from actors.machine.transitions import CHANGES
from actors.testing import soak as soak_module
from actors.testing.oracle import OracleError
from actors.testing.soak import BLOCK, SeedBlock, main, replay, run_block, soak

NUM_BLOCKS = tiers.size(100, merge=6)

block_of = cache(lambda block: run_block(block * BLOCK, BLOCK))
"""The result of a block, run once however many tests look at it."""


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_every_order_of_events_gives_the_same_run_and_brings_every_slot_home(block):
    result = block_of(block)
    assert result.failed is None, replay(result.failed)
    assert result.num_seeds == BLOCK


def test_every_change_that_the_table_allows_happens_and_no_other():
    seen = frozenset().union(*[block_of(block).changes for block in range(NUM_BLOCKS)])
    assert seen == frozenset(CHANGES)


@pytest.fixture
def broken(monkeypatch):
    """An actor that ends takes a slot too many for its own."""
    finish = Ending.finish

    def finish_rich(self, actor):
        finish(self, actor)
        self.columns.level[0] += 1

    monkeypatch.setattr(Ending, "finish", finish_rich)


def test_a_block_stops_at_the_first_seed_that_fails(broken):
    block = run_block(0, 50)
    assert block.failed == block.num_seeds < 50
    again = run_block(block.failed, 1)
    assert (again.failed, again.num_seeds) == (block.failed, 0)


def test_a_replay_tells_the_graph_the_commands_the_messages_and_the_error(broken):
    seed = run_block(0, 50).failed
    text = replay(seed)
    for part in (f"seed {seed}:", "a0: stream", "Edge(name='r", "Command(order=", "END", "Error: "):
        assert part in text


def test_a_replay_of_a_seed_without_fault_says_so():
    assert replay(0).endswith("it passes")


def test_progress_is_told_in_order_with_where_to_go_on():
    blocks = [SeedBlock(0, 1000, 5, frozenset(), None), SeedBlock(1000, 300, 5, frozenset(), 1300)]
    clock, lines = iter([0.0, 20.0, 25.0]), []
    assert soak(blocks, 2000, lambda: next(clock), lines.append) == 1300
    assert len(lines) == 2
    assert lines[0].startswith("1,000 of 2,000 seeds, 5 events, 50 seeds/s, 0 of ")
    assert lines[1].endswith("next: --first 1300")


def test_the_command_succeeds_and_says_so(capsys):
    assert main(["--first", "7", "--count", "30", "--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert "30 of 30 seeds" in out
    assert "no seed fails" in out


def test_the_command_replays_the_first_seed_that_fails(broken, capsys):
    seed = run_block(0, 50).failed
    assert main(["--count", "50", "--processes", "1"]) == 1
    out = capsys.readouterr().out
    assert f"replay it: python -m actors.testing.soak --first {seed} --count 1" in out


def test_an_interrupted_command_can_be_resumed(monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(soak_module, "run_block", interrupt)
    assert main(["--count", "50", "--processes", "1"]) == 130
    assert "where to go on" in capsys.readouterr().out


def test_an_oracle_error_is_a_failed_seed_and_no_crash(monkeypatch):
    def fail(*arguments, **options):
        raise OracleError("no")

    monkeypatch.setattr(soak_module, "play", fail)
    assert run_block(3, 5).failed == 3
    assert "OracleError: no" in replay(3)
