def square(number):
    """The number times itself."""
    return number**2
