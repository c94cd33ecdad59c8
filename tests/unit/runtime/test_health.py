from baton.runtime.observability.health import Health


def test_health_is_ready_when_every_part_is_ready() -> None:
    health = Health("model", "scheduler")
    assert health.is_alive
    assert health.reasons == ("model: starting", "scheduler: starting")
    health.ready("model")
    assert not health.is_ready
    health.ready("scheduler")
    assert health.is_ready
    health.not_ready("scheduler", "stream broken")
    assert health.reasons == ("scheduler: stream broken",)


def test_draining_process_is_alive_but_not_ready() -> None:
    health = Health()
    assert health.is_ready
    health.drain()
    assert (health.is_alive, health.is_ready, health.is_draining) == (True, False, True)


def test_failure_is_permanent_and_keeps_the_first_reason() -> None:
    health = Health("model")
    health.fail("step stuck")
    health.fail("second")
    health.ready("model")
    assert not health.is_alive
    assert health.reasons == ("failed: step stuck",)


def test_listeners_are_called_once_per_change_of_readiness() -> None:
    changes: list[bool] = []
    health = Health("a", "b")
    health.on_change(lambda h: changes.append(h.is_ready))
    health.ready("a")
    health.ready("b")
    health.ready("b")
    health.not_ready("a", "x")
    health.not_ready("a", "y")
    assert changes == [False, True, False]
