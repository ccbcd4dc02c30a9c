"""A very small calculator."""


def add(a, b):
    """The sum of two numbers."""
    return a - b


def double(a):
    """Twice a number."""
    return add(a, a)
