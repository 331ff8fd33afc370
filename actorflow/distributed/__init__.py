"""Several ranks as one job: launched, agreed on every step, with one plan and one checkpoint.

`actorflow launch` starts a process per rank, through an agent on each host, and the coordinator,
which lives in the launcher. When one rank fails, all end, and all are started again as an epoch if
that may help. Each rank has a `RankClient`, which exchanges messages with the coordinator over zmq.
The agreement decides from messages alone which steps may begin, where all stop and which step is
saved. The tensors of a step do not pass here: `actors.collectives` moves those.

process_group.py    `ProcessGroup`: this process among the ranks; what they compare first
member.py           `RankClient`; `RankLink`, the thread that owns a rank's socket
distributed_run.py  `DistributedRun`: one run, as a rank has it; `BatchDigestReporter`, digests of
                    its batches
messages.py         what ranks and coordinator say, as dataclasses; keys; frames on the wire
agreement.py        `CoordinatorState`: messages in, messages out, no I/O
rank_waits.py       `RankWaits`: who waits how long for the others, and for whom
rank_failure.py     `RankFailure`: which rank failed, how, and in which words
coordinator.py      `Coordinator`: the agreement over zmq, one thread, CURVE keys
launcher.py         `launch`: one start of all ranks, from the first process to the verdict
rendezvous.py       which host this is, the launcher's address, the job's secret; `launch_on_hosts`
hosts.py            `HostAgents`: the agents of all hosts, here and over zmq; hosts that are lost
agent.py            `Agent`: the ranks of one host; `AgentService`, its process on another host
agent_messages.py   what launcher and agents say, as dataclasses; keys of agents
rank_process.py     the process of a rank: its cores, its output, how it starts and ends
signal_notes.py     `SignalNotes`: signals to this process, for the loop that acts on them
ray_hosts.py        `RayHosts`: the agents of hosts that Ray provides, each started by an actor
host_check.py       `check_hosts`, `findings`: whether hosts fit together, before a job is run
link_probe.py       a link between two hosts, tried: reached or not, time, rate, clock
restart.py          `supervise`: epochs, one start of all ranks after the other; `RestartPolicy`
agreed_plan.py      a plan for every rank, compiled once per class; what differs between two ranks
unshard.py          which rank holds what; whole variables from the parts of all ranks
sharded_save.py     a checkpoint of all ranks: who writes what, votes, the two phases
run_directory.py    the proof that all ranks have one run directory

May import actorflow.{checkpoint, compile, data, environment, options, tensor};
actors.{collectives, machine}; compiler.{contract, graph, ops.primitives, pipeline, verify};
memory.report. Must not import trace, run, jobs or cli. zmq is imported by agents, hosts,
launcher.py, coordinator.py and member.py alone, ray by ray_hosts.py; a run of one rank loads
neither.

Begin reading at process_group.py, then distributed_run.py, which are all that a run asks of the
others; then agreement.py, whose docstring says why a stop or a checkpoint falls on the same step of
every rank.
"""
