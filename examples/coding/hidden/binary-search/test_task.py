from task import find


def test_absent():
    assert find([1, 3], 4) == -1
    assert find([1, 3], 3) == 1
