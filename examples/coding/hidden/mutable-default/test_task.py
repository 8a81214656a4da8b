from task import collect


def test_fresh():
    assert collect(1) == [1]
    assert collect(2) == [2]
