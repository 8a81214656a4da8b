from task import parse


def test_equals():
    assert parse("q=a=b") == {"q": "a=b"}
