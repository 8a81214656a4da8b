from task import percent


def test_nothing():
    assert percent(0, 0) == 0
