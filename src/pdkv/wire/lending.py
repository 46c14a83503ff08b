"""Names of what an engine lends another one out of its cache: a request's own, marked.

So both parts may meet on one engine. The router asks the lender in the name of the borrower's request (a Submit with
until="cached"). Lease, hand-off and ticket of a loan are the lender's under that name; the load is the borrower's under
its own.
"""

_MARK = "/lent"


def lent_id(name: str) -> str:
    """A request's or a transfer's id, as the lender knows it."""
    return name + _MARK


def is_lent(name: str) -> bool:
    """Whether an id is a lender's."""
    return name.endswith(_MARK)


def borrower_id(name: str) -> str:
    """The request or transfer that a lender's id is about; any other id is about itself."""
    return name.removesuffix(_MARK)
