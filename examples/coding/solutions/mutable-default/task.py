def collect(item, items=None):
    """A list with the item added: a new one when none is given."""
    items = [] if items is None else items
    items.append(item)
    return items
