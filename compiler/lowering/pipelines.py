"""Several batches of a pipeline's stage under way at a time: how many, and what that asks for.

Stage s of P has up to P - s batches whose forward pass is done and whose backward pass is not: so
many slots have the registers between the two. Nothing else makes the schedule "one forward, one
backward" (Narayanan et al., PipeDream, 2019): a stage goes forward while it has slots, and then as
slots come home. What a neighbour sends has one more, to come in while the stage computes.

Between such firings there is no order. So what is used within one has bytes of its own, and batches
that hand on a variable do so in turn (`compiler.lowering.stage_fences`).
"""

from __future__ import annotations

from compiler.facts import fact
from compiler.graph import Graph, Node, mark_needed
from compiler.lowering.storage import assign_storage
from compiler.ops.channels import RECEIVE, SEND, is_over_stages
from compiler.rates import batches_per_step
from compiler.types import Phase

CHANNELS = ("all_reduce", "send_up", "send_down", "receive_up", "receive_down", "all_reduce_back")
"""What the streams of a device between ranks are for, by number: collectives, ends of channels.

The last one is for collectives of a stage's backward pass: those of its forward pass belong to
later batches, and which of the two come first ranks need not agree on.
"""


def comm_stream(node: Node) -> int:
    """Return the number of the stream of what moves tensors between ranks."""
    if node.op not in (SEND, RECEIVE):
        return 5 if node.attrs.get("is_back") else 0
    return 1 + 2 * (node.op is RECEIVE) + (not node.attrs.bool_("is_up"))


def batches_in_flight(graph: Graph) -> int:
    """Return how many batches a stage may have under way: 1 where that changes nothing.

    That is so for the last stage, without a pipeline, and where every batch changes what the next
    one reads.
    """
    stage, num_stages = 0, 1
    for node in graph.nodes:
        if node.op in (SEND, RECEIVE):
            is_to_last = node.attrs.bool_("is_up") is (node.op is SEND)
            stage = node.attrs.int_("peer") + (-1 if is_to_last else 1)
            num_stages = node.attrs.int_("num_ranks")
            break
    most = num_stages - stage
    return min(most, batches_per_step(graph)) if graph.writes else most


@fact
def has_channels(graph: Graph) -> bool:
    """Whether a graph is that of a stage, some batches of which may be under way."""
    is_stage = any([node.op in (SEND, RECEIVE) for node in graph.nodes])
    return is_stage and (batches_per_step(graph) > 1 or not graph.writes)


def is_returning(node: Node) -> bool:
    """Whether a launch receives what comes back from later stages."""
    return node.op is RECEIVE and not node.attrs.bool_("is_up")


@fact
def stage_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return pairs (before, after) of launches: what a stage waits for beyond values.

    What all stages make together comes after all that it sends and receives for a batch: its end
    would wait for it else, and with it what another stage needs for its part. Launches are indices
    of nodes. O(nodes).
    """
    nodes = list(enumerate(graph.nodes))
    over = [i for i, node in nodes if is_over_stages(node)]
    moves = [i for i, node in nodes if node.op in (SEND, RECEIVE)]
    return (*_return_edges(graph), *[(i, j) for i in moves for j in over])


def _return_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return pairs (before, after) of launches: the backward pass begins when gradients have come.

    What could begin before would be made, and lie in slots, for all batches under way.
    """
    back = [i for i, node in enumerate(graph.nodes) if is_returning(node)]
    if not back:
        return ()
    is_launch = assign_storage(graph).is_launch
    is_before = mark_needed(graph, [graph.nodes[i].outputs[0] for i in back])
    late = [
        i
        for i, node in enumerate(graph.nodes)
        if node.phase is Phase.BACKWARD and is_launch[i] and not is_before[i]
    ]
    return tuple([(i, j) for i in back for j in late])
