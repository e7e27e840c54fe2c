"""Put this folder on PYTHONPATH to simulate a file system without flock, like some network file systems."""

import errno
import fcntl
import os
from typing import NoReturn


def flock(*_: object) -> NoReturn:
    """As Linux answers there."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


fcntl.flock = flock
