"""Groups of a program's calls that one row kernel computes."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from quantkit.fusion.program import Call, Program, Value
from quantkit.fusion.rows.lowering import NotARowError, Rows
from quantkit.fusion.rows.row_operators import lower, places_of
from quantkit.fusion.sources import Sources

#: Calls between the first and the last of a group.
_REACH = 400


@dataclass(frozen=True, eq=False)
class Group:
    """Calls that are made at once, in the program's order: one that stays, or a row kernel's."""

    #: places of the calls in the program
    calls: tuple[int, ...]
    #: None: no row kernel computes it
    rows: Rows | None = None


def group(program: Program) -> tuple[Group, ...]:
    """Return the calls of a program in groups, in an order in which they can be made."""
    groups = _Grouping(Sources(program))
    for place in range(len(program.calls)):
        groups.add(place)
    return groups.ordered()


class _Grouping:
    def __init__(self, sources: Sources) -> None:
        self._sources, self._calls = sources, sources.program.calls
        #: place of a call -> its group
        self._group_of: dict[int, Group] = {}
        self._maker: dict[Value, int] = {}
        #: of memory that is written to, by its storage: the last write so far, and reads since
        self._written: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        #: place of a call -> those that it must follow for their writes or its own
        self._after: dict[int, list[int]] = {}

    def add(self, place: int) -> None:
        """Put the next call in a group of earlier ones, or in its own."""
        call = self._calls[place]
        self._note_memory(place)
        for value in filter(None, call.results):
            self._maker.setdefault(value, place)
        self._keep(self._joined(place) or Group((place,), self._alone(place)))

    def _note_memory(self, place: int) -> None:
        """Let a call follow what writes to the memory that it reads, or reads what it writes."""
        call, sources = self._calls[place], self._sources
        for value in (*call.reads, *filter(None, call.results)):
            storage = sources.program.layouts[value].storage
            if storage not in sources.last_writes:
                continue
            if storage in self._written:
                self._after.setdefault(place, []).append(self._written[storage])
            if call.writes:
                self._after.setdefault(place, []).extend(self._reads.pop(storage, ()))
                self._written[storage] = place
            else:
                self._reads.setdefault(storage, []).append(place)

    def ordered(self) -> tuple[Group, ...]:
        """Return all groups; of those in a circle, each call is a group."""
        while True:
            found = self._sorted()
            left = {*self._group_of.values()} - {*found}
            if not left:
                return tuple(found)
            for place in [place for one in left for place in one.calls]:
                self._group_of[place] = Group((place,))

    def _keep(self, new: Group) -> None:
        for place in new.calls:
            self._group_of[place] = new

    def _rows_of(self, calls: Sequence[int], numel: int) -> Rows | None:
        """Return the rows of calls; None where there are none."""
        rows = Rows(self._sources, numel)
        try:
            for place in calls:
                rows = lower(rows, self._calls[place])
        except NotARowError:
            return None
        return rows

    def _alone(self, place: int) -> Rows | None:
        call = self._calls[place]
        numel = places_of(call, self._sources.program.layouts)
        return self._rows_of((place,), numel) if numel else None

    def _joined(self, place: int) -> Group | None:
        """Return a group with a call and those that made what it reads; None: there is none."""
        call = self._calls[place]
        numel = places_of(call, self._sources.program.layouts)
        if not numel:
            return None
        makers = self._makers(call)
        for chosen in (makers, *((one,) for one in makers if len(makers) > 1)):
            calls = sorted({place, *(other for one in chosen for other in one.calls)})
            if not chosen or place - calls[0] > _REACH or self._circles(calls):
                continue
            places = max(numel, *(one.rows.numel for one in chosen if one.rows))
            if rows := self._extended(chosen, places, place, calls):
                return Group(tuple(calls), rows)
        return None

    def _extended(
        self, chosen: Sequence[Group], numel: int, place: int, calls: Sequence[int]
    ) -> Rows | None:
        """Return the rows of one group and a call, or of several, which are lowered again."""
        rows = chosen[0].rows
        if len(chosen) > 1 or rows is None or rows.numel != numel:
            return self._rows_of(calls, numel)
        try:
            return lower(rows, self._calls[place])
        except NotARowError:
            return None

    def _makers(self, call: Call) -> tuple[Group, ...]:
        """Return the groups of row kernels that made what a call reads."""
        found: dict[Group, None] = {}
        for value in call.reads:
            maker = self._maker.get(self._sources.bases.get(value, value))
            if maker is not None and self._group_of[maker].rows is not None:
                found[self._group_of[maker]] = None
        return tuple(found)

    def _needs(self, calls: Sequence[int]) -> Iterator[int]:
        """Yield the calls outside of these that they wait for."""
        mine = {*calls}
        for place in calls:
            before = [
                self._maker.get(v) for v in self._calls[place].reads if not self._is_of(v, mine)
            ]
            for maker in (*before, *self._after.get(place, ())):
                if maker is not None and maker not in mine:
                    yield maker

    def _is_of(self, value: Value, calls: AbstractSet[int]) -> bool:
        """Tell whether a value, or what it is a view of, is made by one of these calls."""
        return self._maker.get(self._sources.bases.get(value, value)) in calls

    def _circles(self, calls: Sequence[int]) -> bool:
        """Tell whether something outside waits for these calls, and they wait for it."""
        mine, first = {*calls}, calls[0]
        waiting, seen = [*self._needs(calls)], set[Group]()
        while waiting:
            other = self._group_of[waiting.pop()]
            if other in seen or other.calls[-1] < first:
                continue
            seen.add(other)
            for need in self._needs(other.calls):
                if need in mine:
                    return True
                waiting.append(need)
        return False

    def _sorted(self) -> list[Group]:
        """Return groups that are in no circle, each after those that it needs."""
        groups = {*self._group_of.values()}
        open_ = {one: {self._group_of[n] for n in self._needs(one.calls)} - {one} for one in groups}
        users: dict[Group, list[Group]] = {}
        for one, needs in open_.items():
            for need in needs:
                users.setdefault(need, []).append(one)
        heap = [(one.calls[-1], one) for one, needs in open_.items() if not needs]
        return _by_place(heap, open_, users)


def _by_place(
    ready: list[tuple[int, Group]],
    open_: Mapping[Group, set[Group]],
    users: Mapping[Group, Sequence[Group]],
) -> list[Group]:
    """Return groups as soon as they can be made, of several the one whose last call is first."""
    heapq.heapify(ready)
    found = []
    while ready:
        _, one = heapq.heappop(ready)
        found.append(one)
        for user in users.get(one, ()):
            open_[user].discard(one)
            if not open_[user]:
                heapq.heappush(ready, (user.calls[-1], user))
    return found
