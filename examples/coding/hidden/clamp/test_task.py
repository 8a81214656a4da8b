from task import clamp


def test_outside():
    assert clamp(-1, 0, 9) == 0
    assert clamp(99, 0, 9) == 9
    assert clamp(4, 0, 9) == 4
