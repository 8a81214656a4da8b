def minutes(seconds):
    """Seconds as minutes."""
    return seconds / 60
