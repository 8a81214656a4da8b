def add(a, b):
    """The sum of two numbers."""
    return a + b
