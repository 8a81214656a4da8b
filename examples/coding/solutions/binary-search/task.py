def find(ordered, value):
    """The position of the value in an ordered list, or -1."""
    low, high = 0, len(ordered) - 1
    while low <= high:
        middle = (low + high) // 2
        if ordered[middle] == value:
            return middle
        if ordered[middle] < value:
            low = middle + 1
        else:
            high = middle - 1
    return -1
