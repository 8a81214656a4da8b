def clamp(value, low, high):
    """The value, within the limits."""
    return max(low, min(value, high))
