def chunks(items, size):
    """The items in lists of `size`; the last may be shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]
