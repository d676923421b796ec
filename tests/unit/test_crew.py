"""Tasks that are done at the same time."""

from __future__ import annotations

import threading
import time
import weakref

import pytest

from pxrs.log.directory.crew import Crew


def test_tasks_run_at_the_same_time_and_results_keep_their_order() -> None:
    crew = Crew(helpers_max=3)
    meeting = threading.Barrier(4, timeout=30)
    assert [at for at, _ in crew.run([lambda at=at: (at, meeting.wait()) for at in range(4)])] == [0, 1, 2, 3]
    assert crew.run([lambda at=at: at for at in range(50)]) == list(range(50))
    assert crew.run([]) == []
    crew.close()
    assert crew.run([lambda: 1, lambda: 2]) == [1, 2]  # by the caller alone


def test_the_first_error_is_raised_when_all_are_done() -> None:
    crew = Crew()
    done = []

    def fail(name: str) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match="first"):
        crew.run([lambda: done.append(1), lambda: fail("first"), lambda: fail("second"), lambda: done.append(2)])
    assert sorted(done) == [1, 2]
    crew.close()


def test_after_an_interrupt_no_more_are_begun() -> None:
    crew = Crew(helpers_max=0)
    begun: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        crew.run([fail, interrupt, lambda: begun.append(1)])
    assert not begun


def test_without_threads_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Crew().run([threading.get_ident for _ in range(3)]) == [threading.get_ident()] * 3


def test_threads_end_with_the_crew_and_keep_nothing() -> None:
    class Task:
        def __call__(self) -> threading.Thread:
            meeting.wait()
            return threading.current_thread()

    meeting = threading.Barrier(2, timeout=30)
    crew = Crew(helpers_max=1)
    tasks = [Task(), Task()]
    kept = [weakref.ref(task) for task in tasks]
    (helper,) = {*crew.run(tasks)} - {threading.current_thread()}
    tasks.clear()
    until = time.monotonic() + 10
    while any(each() is not None for each in kept):
        assert time.monotonic() < until
    del crew
    helper.join(30)
    assert not helper.is_alive()
