"""How many calls each worker may have in flight, so that all together never have more than were asked for."""

from __future__ import annotations

from collections.abc import Sequence


class Share:
    """One worker's part: what it was told, and what it may still have in flight of what it was told before."""

    def __init__(self) -> None:
        self.told = 0
        self.number = 0
        self._held = 0

    @property
    def held(self) -> int:
        """The most that it can have in flight at this moment."""
        return max(self.told, self._held)

    def tell(self, share: int) -> None:
        """A new share is on its way; a smaller one binds only when the worker has heard of it."""
        self._held = self.held
        self.told = share
        self.number += 1

    def heard(self, number: int, inside: int) -> None:
        """The worker said which share it knows and how many calls it has in flight."""
        if number == self.number:
            self._held = inside

    def clear(self) -> None:
        """The worker is gone, and its calls with it."""
        self.told = self._held = 0


def share_out(total: int, shares: Sequence[Share], expected: int = 0) -> list[Share]:
    """Divide evenly, leaving room for as many workers as are still expected; those that changed.

    What one worker is to give up is given to another only when it is free.
    """
    places = len(shares) + expected
    fair = [total // places + (place < total % places) for place in range(places)] if places else []
    changed = []
    for share, wanted in zip(shares, fair, strict=False):
        if wanted < share.told:
            share.tell(wanted)
            changed.append(share)
    free = total - sum(share.held for share in shares)
    for share, wanted in zip(shares, fair, strict=False):
        more = min(wanted - share.told, free + share.held - share.told)
        if more > 0:
            free -= max(0, share.told + more - share.held)
            share.tell(share.told + more)
            changed.append(share)
    return changed
