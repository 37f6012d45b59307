"""Errors of a process whose memory is limited, as by `ulimit -v`."""

import re
import resource


def is_memory_error(error: BaseException) -> bool:
    """Return True if this process has a limit of memory, and `error` of whatever type says that memory is short.

    Without a limit, only damaged or hostile files need so much memory that allocation fails.
    """
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    text = re.search("memory|allocat|start new thread", str(error), re.IGNORECASE)
    return is_limited and (isinstance(error, MemoryError) or text is not None)
