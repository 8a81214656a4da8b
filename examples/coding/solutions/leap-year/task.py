def is_leap(year):
    """Whether a year has 366 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
