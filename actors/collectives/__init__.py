"""Tensors between the ranks of a run.

`protocol` says what the runtime asks of a transport, and how ranks agree on anything at all.
`shared_memory` is the transport between ranks on one host. `collective` says which bytes go where,
`lanes` who meets whom, `agreement` what ranks compare before the first step, `board` and `segments`
what they share, and `meeting` launches the C of `meet.c`.
"""
