"""Commands for a thread that sleeps in `poll`."""

import os
import select
from contextlib import closing

from baton.runtime.thread_commands import ThreadCommands


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def test_commands_run_in_their_order_with_those_that_they_add() -> None:
    with closing(ThreadCommands()) as commands:
        ran: list[int] = []
        commands.add(lambda: commands.add(lambda: ran.append(3)))
        commands.add(lambda: ran.append(2))
        assert is_readable(commands.wake_fd)
        assert commands.run()
        assert ran == [2, 3]
        assert not commands.run()
        commands.drain()
        assert not is_readable(commands.wake_fd)


def test_thread_that_does_not_read_the_pipe_blocks_no_caller() -> None:
    with closing(ThreadCommands()) as commands:
        for _ in range(70_000):  # more than a pipe holds
            commands.wake()


def test_closed_commands_write_to_no_file_that_has_their_descriptor() -> None:
    commands = ThreadCommands()
    commands.close()
    pipes = [os.pipe() for _ in range(8)]  # the descriptors of the closed pipe are among them
    try:
        commands.add(lambda: None)
        commands.wake()
        assert not any(is_readable(read) for read, _write in pipes)
    finally:
        for pipe in pipes:
            for fd in pipe:
                os.close(fd)
