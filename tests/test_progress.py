"""What is seen of a search, and how Ctrl-C ends it."""

import os
import signal

import pytest

from autopar.cli.progress import watched
from autopar.solver.effort import Progress

FOUND = Progress(seconds=2.0, bound=1.9, waiting=3, candidates=8)


@pytest.fixture(autouse=True)
def python_answers_interrupts():
    """A shell that starts tests in the background has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_of_a_search_ends_it_the_second_the_program(capsys):
    with pytest.raises(KeyboardInterrupt), watched() as watch:
        assert watch(FOUND) is True
        interrupt()
        assert watch(FOUND) is False
        assert "ending with the best plan so far" in capsys.readouterr().err
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_before_there_is_a_search_an_interrupt_ends_the_program():
    with pytest.raises(KeyboardInterrupt), watched():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
