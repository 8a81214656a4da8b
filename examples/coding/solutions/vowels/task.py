def vowels(text):
    """How many vowels a text has."""
    return sum(letter in "aeiou" for letter in text.lower())
