def last(items):
    """The last item of a list."""
    return items[len(items) - 1]
