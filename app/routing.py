"""Pages are shown by the router in `app/main.py`, whichever way Streamlit came to them.

A server that has not run the router yet takes every file in the folder `pages` for a page of its own, and runs it alone when a
link leads straight there. Such a file then hands over to the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_routed: ContextVar[bool] = ContextVar("routed", default=False)


@contextmanager
def routed() -> Iterator[None]:
    """Inside, pages show themselves."""
    token = _routed.set(True)
    try:
        yield
    finally:
        _routed.reset(token)


def show(page: Callable[[], None]) -> None:
    """Show the page, or go through the router if it has not been asked."""
    if _routed.get():
        page()
        return
    from app.main import main

    main()
