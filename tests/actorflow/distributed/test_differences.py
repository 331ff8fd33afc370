"""Ranks that do not run the same job are told what differs first, in the words of the user."""

import re
from dataclasses import replace

import numpy as np
import pytest
from rank_threads import RankThreads

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.errors import Every
from actorflow.distributed.agreed_plan import plans_of_classes
from actorflow.distributed.process_group import ProcessGroup
from actorflow.nn.module import Module
from actorflow.options.run_spec import PlanOptions
from compiler.contract.errors import CompileError
from compiler.contract.placement import BETWEEN_HOSTS, INSIDE_A_HOST, Hosts, MeshLink, on_hosts

X = np.ones((24, 8), np.float32)
X_TYPE = af.TensorType(af.DType.FLOAT32, (6, 8))
CHOSEN = {"rate": 0.1, "width": 4, "rows": 6, "p": 0.1, "act": af.relu, "every": 10, "more": None}


class Net(nn.Module):
    def __init__(self, width):
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)


def asked_on(rank, chosen):
    said = CHOSEN | chosen
    options = said["more"] or {}

    def train(model, batch):
        hidden = af.dropout(said["act"](model.up(batch.x)), said["p"])
        loss = af.mse_loss(model.down(hidden), batch.x)
        return {"loss": loss, **({"twice": loss} if said.get("twice") else {})}

    job = af.job(optimizer=af.optim.AdamW(said["rate"]), mesh=af.Mesh(data=2), **options)(train)
    data = af.data.ArraySource({"x": X}, batch=said["rows"])
    period = None if said["every"] is None else Every.parse(said["every"])
    call = PlanOptions(period, said.get("evaluation"), said.get("on_nan", "raise"))
    return job, job._spec(Net(said["width"]), data, call, job.ranks(rank))


def on_two_hosts(rank, link):
    """Return what a rank asks for whose host has a link of its own to the others."""
    job, asked = asked_on(rank, {})
    mesh, hosts = af.Mesh(data=2), Hosts((1,), INSIDE_A_HOST, link)
    hardware = replace(asked.hardware, ranks=on_hosts(mesh, hosts, rank))
    return job, replace(asked, hardware=hardware)


def test_a_link_between_hosts_that_one_rank_has_otherwise_is_told_by_its_variable():
    links = (BETWEEN_HOSTS, MeshLink(12.5, 5_000.0))
    errors = refused([on_two_hosts(rank, link) for rank, link in enumerate(links)])
    assert (
        "the link between hosts (ACTORFLOW_LINK) is 12.5 GB/s and 5 us a message on rank 1 and"
        " 1.25 GB/s and 30 us a message on rank 0"
    ) in errors[0]


def test_ranks_on_two_hosts_with_equal_parts_of_the_work_have_one_plan():
    ranks = plans_of_classes(on_two_hosts(0, BETWEEN_HOSTS)[1])
    assert ranks.class_of == (0, 0)
    assert ranks.plans[0].hosts == Hosts((1,), INSIDE_A_HOST, BETWEEN_HOSTS)
    assert asked_on(0, {})[0].compile(Net(4), {"x": X_TYPE}).hosts is None


def refusal(**chosen):
    """Return what both ranks are told where the second has chosen other than the first."""
    return refused([asked_on(rank, chosen if rank else {}) for rank in range(2)])


def refused(request):
    """Return what both ranks are told that ask for other things."""
    ranks, errors = RankThreads(2), []

    def one(rank):
        job, wanted = request[rank]
        with pytest.raises(CompileError) as caught:
            job._plan(wanted, ProcessGroup(rank, ranks.gather(rank)), Module())
        errors.append(str(caught.value))

    ranks.run(one)
    return errors


def reports(model, batch):
    return {"loss": af.mse_loss(model.down(model.up(batch.x)), batch.x)}


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"rate": 0.2}, "AdamW's lr is 0.2 on rank 1 and 0.1 on rank 0"),
        ({"more": {"accumulate": 2}}, "accumulate= is 2 on rank 1 and 1 on rank 0"),
        ({"more": {"clip_norm": 1.0}}, "clip_norm= is 1.0 on rank 1 and None on rank 0"),
        (
            {"every": 5},
            "checkpoint= (every= and keep=) is every 5 steps on rank 1 and every 10 steps on rank",
        ),
        (
            {"every": "30s"},
            "checkpoint= (every= and keep=) is every 30 s on rank 1 and every 10 steps on",
        ),
        (
            {"every": None},
            "checkpoint= (every= and keep=) is none on rank 1 and every 10 steps on rank 0",
        ),
        ({"on_nan": "skip"}, "on_nan= is 'skip' on rank 1 and 'raise' on rank 0"),
        ({"rows": 8}, "'x' of the batch is float32[8, 8] on rank 1 and float32[6, 8] on rank 0"),
        (
            {"width": 5},
            "rank 1 has parameter 'up.weight' float32[5, 8] (LINE) where rank 0 has parameter"
            " 'up.weight' float32[4, 8] (LINE)",
        ),
        (
            {"act": af.sigmoid},
            "rank 1 has sigmoid float32[6, 4] (LINE) where rank 0 has relu float32[6, 4] (LINE)",
        ),
        (
            {"p": 0.2},
            "rank 1 has dropout float32[6, 4] with p=0.2 (LINE) where rank 0 has dropout"
            " float32[6, 4] with p=0.1 (LINE)",
        ),
        ({"twice": True}, "rank 1 makes other use of the same ops: what is returned or updated"),
    ],
)
def test_the_first_difference_is_told_in_the_words_of_the_user(chosen, text):
    errors = refusal(**chosen)
    assert errors[0] == errors[1]
    told = re.sub(r"\(\S+test_differences.py:\d+\)", "(LINE)", errors[0])
    assert text in told
    assert re.match(r"\S+test_differences.py:\d+: ranks run job 'train' differently: ", told)
    assert len(told) < 400


def test_an_evaluation_of_one_rank_alone_is_told():
    job = af.job(train=False)(reports)
    evaluation = af.Evaluation(job, af.data.ArraySource({"x": X}, batch=4), every=5, batches=2)
    errors = refusal(evaluation=evaluation)
    assert "every= of evaluation= is 5 on rank 1 and none on rank 0" in errors[0]


def test_ranks_that_run_the_same_job_tell_each_other_no_more_than_that():
    ranks = RankThreads(2)
    request = [asked_on(rank, {}) for rank in range(2)]

    def one(rank):
        job, wanted = request[rank]
        job._plan(wanted, ProcessGroup(rank, ranks.gather(rank)), Module())

    ranks.run(one)
    assert not any("differs" in name for name, _ in ranks.said)
    assert {len(value[1]) for value in ranks.said["compile job 'train'", 1].values()} == {32}


def test_ranks_that_call_from_other_lines_are_told_both():
    ranks, errors = RankThreads(2), []
    request = [asked_on(rank, {"rows": 6 + 2 * rank}) for rank in range(2)]

    def one(rank):
        job, wanted = request[rank]
        group = ProcessGroup(rank, ranks.gather(rank))
        calls = (
            lambda: job._plan(wanted, group, Module()),
            lambda: job._plan(wanted, group, Module()),
        )
        with pytest.raises(CompileError) as caught:
            calls[rank]()
        errors.append(str(caught.value))

    ranks.run(one)
    for text in errors:
        here = r"\S+test_differences.py:\d+"
        assert re.search(rf"on rank 0 \(rank 1 is at {here}, and rank 0 at {here}\); run", text)
