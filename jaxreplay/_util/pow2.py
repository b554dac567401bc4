"""Powers of two. Blocks of rows have these sizes, so that few programs are compiled."""


def power_below(number: int) -> int:
    """Return the largest power of two that is at most `number`, and at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def power_above(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (max(number, 1) - 1).bit_length()
