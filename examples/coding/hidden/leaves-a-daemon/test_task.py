from task import initials


def test_small():
    assert initials("ada lovelace") == "AL"
