"""Distributes test files over the processes of pytest-xdist, and splits files whose tests share nothing."""

from zlib import crc32

from xdist.scheduler import LoadFileScheduling

from tests.scale import sized

SPLIT_FILES = ("tests/sim/test_storm.py", "tests/sim/test_storm_of_this_code.py")
"""Files with hundreds of tests in full size, which need not share anything. Otherwise one process would run
them long after the others have ended."""
PARTS = sized(1, 8)
"""Parts of each split file. A process runs one part at a time. In `make test` the files are short, and their
tests share storms."""


class FileScheduling(LoadFileScheduling):
    """`--dist loadfile`, in which a process may run a part of one of the `SPLIT_FILES`."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return f"{file}#{crc32(nodeid.encode()) % PARTS}" if file in SPLIT_FILES else file
