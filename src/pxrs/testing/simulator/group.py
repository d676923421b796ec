"""The members of a simulated group: starting, stopping and crashing them."""

from __future__ import annotations

from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.member import SimulatedMember
from pxrs.testing.simulator.settings import TTL_S


class SimulatedGroup:
    """The members that were started and have neither crashed nor left."""

    def __init__(self, environment: Environment, member_type: type[SimulatedMember]) -> None:
        self._environment, self._member_type = environment, member_type
        self.members: list[SimulatedMember] = []
        self._names = 0

    def start_member(self, name: str | None = None) -> SimulatedMember:
        """Start one more member; by default one with a new name."""
        if name is None:
            self._names += 1
            name = f"w{self._names}"
        acks_in_any_order = self._environment.rng.random() < 0.3
        member = self._member_type(self._environment, name, acks_in_any_order=acks_in_any_order)
        self.members.append(member)
        self._environment.note(name, "starts")
        return member

    def stop(self, member: SimulatedMember) -> None:
        """Stop a member for up to four times the ttl of its lease, now or when it has decided on its next write. It
        continues where it was."""
        rng = self._environment.rng
        seconds = rng.uniform(0.5, 4.0) * TTL_S
        if rng.random() < 0.3:
            member.stopped_until = self._environment.now + seconds
        else:
            member.stops_at_write_s = seconds

    def crash(self, member: SimulatedMember) -> None:
        member.drop()
        self.members.remove(member)

    def remove_those_out(self) -> None:
        """Remove the members that have left."""
        if any(member.is_out for member in self.members):
            self.members = [member for member in self.members if not member.is_out]

    def wake(self, keys: list[str], is_quiet: bool) -> None:
        """These keys have changed. A quiet commit wakes nobody."""
        if not is_quiet:
            for member in self.members:
                member.woken(keys)

    def check_owners(self) -> None:
        """Raise Violation if two members act as the owner of one partition."""
        self._environment.ghost.check_owners(
            (member, place, lane) for member in self.members for place, lane in member.consumer.acting(member.held)
        )

    @staticmethod
    def is_busy(member: SimulatedMember) -> bool:
        """Whether the member has something to do, messages included."""
        return member.has_task or bool(member.consumer.in_hand) or bool(member.readable())
