"""The envelope of a plan in a file: what it is, of which format, and a hash of what is inside."""

from __future__ import annotations

import hashlib

import msgpack

from compiler.errors import PlanFormatError
from compiler.rows import packed

_MAGIC = "actorflow-plan"


def sealed(body: bytes, plan_format: int) -> bytes:
    """Return the bytes of a file that holds a body."""
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    head = {"magic": _MAGIC, "format": plan_format, "digest": digest, "body": body}
    return packed(head)


def opened(data: bytes, plan_format: int, where: str) -> bytes:
    """Return the body in the bytes of a file.

    Raises PlanFormatError, which begins with `where`, when it is damaged or of another format.
    """
    try:
        head = unpacked(data)
    except PlanFormatError as error:
        raise PlanFormatError(f"{where} is not a plan file, or it is damaged: {error}") from None
    if not isinstance(head, dict) or head.get("magic") != _MAGIC:
        raise PlanFormatError(f"{where} is not an actorflow plan file")
    if head.get("format") != plan_format:
        raise PlanFormatError(
            f"{where} has plan format {head.get('format')!a:.40}, this actorflow reads"
            f" format {plan_format}; compile the job again with this version"
        )
    body = head.get("body")
    if not isinstance(body, bytes) or hashlib.blake2b(body, digest_size=16).hexdigest() != head.get(
        "digest"
    ):
        raise PlanFormatError(f"{where} is damaged: its content does not match its hash")
    return body


def unpacked(data: bytes) -> object:
    """Return what msgpack makes of some bytes. Raises PlanFormatError, whatever they are."""
    try:
        return msgpack.unpackb(data, raw=False, use_list=False)
    # Of broken input it raises ValueError and kin; of odd keys and times, these others.
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise PlanFormatError(f"damaged plan: no msgpack: {error}") from None
