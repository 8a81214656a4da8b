from task import vowels


def test_capitals():
    assert vowels("OSLO") == 2
