def flatten(items):
    """All items of nested lists, in one list."""
    flat = []
    for item in items:
        flat.extend(flatten(item) if isinstance(item, list) else [item])
    return flat
