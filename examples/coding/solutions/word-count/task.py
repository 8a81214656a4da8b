def words(text):
    """How many words a text has."""
    return len(text.split())
