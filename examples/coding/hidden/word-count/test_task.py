from task import words


def test_spaces():
    assert words(" a  b ") == 2
    assert words("") == 0
