from task import is_even


def test_even():
    assert is_even(10)
    assert not is_even(7)
