def is_even(number):
    """Whether a number can be halved."""
    return number % 2 == 0
