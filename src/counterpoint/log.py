"""The logger "counterpoint": plans that are new, and files that were read. Silent until asked.

    logging.basicConfig()
    logging.getLogger("counterpoint").setLevel(logging.INFO)

A record has `rank`, for handlers of this logger: records of other loggers have none.

What all ranks of a group do alike its first rank says at INFO, the others at DEBUG.
"""

import logging
import sys
from typing import Any

logger = logging.getLogger("counterpoint")
logger.addHandler(logging.NullHandler())


def with_rank(record: logging.LogRecord) -> bool:
    """Give a record `rank`: this one in torch's default group; None without that."""
    dist: Any = sys.modules.get("torch.distributed")
    rank: int | None = None
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    record.__dict__["rank"] = rank
    return True


logger.addFilter(with_rank)


def say(rank: int, message: str, *values: object) -> None:
    """Log what all ranks do alike.

    Args:
        rank: this one in its group.
        message: as logging takes it, with `values`.
    """
    logger.log(logging.DEBUG if rank else logging.INFO, message, *values)
