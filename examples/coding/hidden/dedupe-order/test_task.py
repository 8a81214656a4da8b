from task import dedupe


def test_order():
    assert dedupe([3, 1, 3, 2]) == [3, 1, 2]
