from task import add


def test_sums():
    assert add(2, 3) == 5
    assert add(-1, 1) == 0
