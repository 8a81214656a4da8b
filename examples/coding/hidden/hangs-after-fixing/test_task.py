from task import minutes


def test_hour():
    assert minutes(3600) == 60
