def initials(name):
    """The first letter of each name, as capitals."""
    return "".join(word[0].upper() for word in name.split())
