def double(number):
    """Twice the number."""
    return number * 2
