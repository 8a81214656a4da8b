from task import chunks


def test_rest():
    assert chunks([1, 2, 3], 2) == [[1, 2], [3]]
