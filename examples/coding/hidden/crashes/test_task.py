from task import double


def test_two():
    assert double(2) == 4
