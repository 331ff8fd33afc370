"""What graphs of cuDNN say: a record, or nothing that is believed."""

import json

import pytest
from error_texts import raises
from graphs_of_cudnn import RECORDS, conv, graph_of, record

from actors.device.cuda.cudnn import UnknownGraph, read_back
from actors.kernels.cuda.calls import BACKWARD, CONV, FORWARD


@pytest.mark.parametrize("name", RECORDS)
def test_a_graph_reads_back_as_the_record_it_was_made_of(name):
    assert read_back(json.dumps(graph_of(RECORDS[name]))) == RECORDS[name]


def with_params(**params):
    graph = graph_of(record(FORWARD))
    graph["nodes"][0]["params"] |= params
    return graph


def with_ways(**params):
    graph = graph_of(conv(CONV))
    graph["nodes"][0]["params"] |= params
    return graph


def without(name):
    graph = graph_of(record(FORWARD))
    del graph["nodes"][0]["params"][name]
    return graph


def with_tensor(**said):
    graph = graph_of(record(BACKWARD))
    graph["tensors"]["the dk"] |= said
    return graph


@pytest.mark.parametrize(
    "graph",
    [
        with_params(right_bound=0),
        with_params(use_causal_mask=True),
        with_params(diagonal_alignment="diagonal_alignment.TOP_LEFT"),
        with_params(diagonal_band_right_bound=1),
        without("diagonal_band_right_bound"),
        without("diagonal_alignment"),
        with_params(generate_stats=False),
        without("attn_scale"),
        with_tensor(dtype="data_type.INT32"),
        with_tensor(is_virtual=True),
        with_tensor(dim=[1, 2, 3]),
        with_tensor(uid=20),
        with_ways(convolution_mode="convolution_mode.CONVOLUTION"),
        with_ways(post_padding=[1, 1]),
        with_ways(stride=[2]),
        with_ways() | {"context": {}},
    ],
    ids=str,
)
def test_what_no_record_means_is_refused(graph):
    with raises(UnknownGraph):
        read_back(json.dumps(graph))


def test_other_nodes_and_other_tensors_are_refused():
    graph = graph_of(record(FORWARD))
    node = graph["nodes"][0]
    for wrong in (
        [node, node],
        [node | {"type": "MATMUL"}],
        [node | {"inputs": node["inputs"] | {"bias": "the q"}}],
    ):
        with raises(UnknownGraph):
            read_back(json.dumps(graph | {"nodes": wrong}))
    swapped = graph_of(record(FORWARD))
    tensors = swapped["tensors"]
    tensors["the q"]["uid"], tensors["the k"]["uid"] = 2, 1
    with raises(UnknownGraph):
        read_back(json.dumps(swapped))
