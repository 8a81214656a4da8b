from task import roman


def test_four():
    assert roman(4) == "IV"
    assert roman(14) == "XIV"
