"""Head dims of a cell of the benches: 128, or 192:128 where V has one of its own."""


def widths(text):
    """(d, d_v) of "128" or "192:128"; ValueError if it is neither."""
    d, d_v = (int(n) for n in (text.split(":") if ":" in text else (text, text)))
    return d, d_v


def of_row(row):
    """(d, d_v) of a report's row; those of older reports have one head_dim."""
    return row["head_dim"], row.get("head_dim_v", row["head_dim"])


def title(dims):
    return ":".join(str(d) for d in dict.fromkeys(dims))


def backward_share(dims):
    """The backward's operations, of the forward's: three products over d and two over d_v, where the forward has one of each."""
    d, d_v = dims
    return (3 * d + 2 * d_v) / (d + d_v)
